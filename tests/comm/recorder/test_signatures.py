"""Signatures of a group's operations: looked up once each, up to a bound."""

from __future__ import annotations

import torch

from mpidist.comm.recorder import ring
from mpidist.comm.recorder import signatures as module
from mpidist.comm.recorder.ring import Ring
from mpidist.comm.recorder.signatures import Signatures


def test_a_form_is_listed_once(monkeypatch):
    monkeypatch.setattr(ring, "_TABLE_BYTES", 1024)
    made = Ring(None, slots=4)
    signatures, tensor = Signatures(made, "send", "world"), torch.ones(2, 3)
    number = signatures["send", tensor.dtype, tensor.shape]
    assert made.signature("send", "send", "world", "float32", (2, 3)) == number
    assert signatures["send", tensor.dtype, torch.Size([2, 3])] == number and len(signatures) == 1
    assert signatures["send_object", None, ()] == number + 1
    for length in range(100):
        last = signatures["send", torch.int64, (length,)]
    assert last == made.signature("send", "send", "world", "int64")
    for number in range(100):
        last = signatures[f"send {number}", None, ()]
    assert last == 1  # the signature of what is not listed
    monkeypatch.setattr(module, "MOST", len(signatures))
    assert signatures["send x", None, ()] == 1 and ("send x", None, ()) not in signatures
    made.close()
