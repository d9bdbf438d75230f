"""Begins of collectives: signature and bytes of a form, and a bound on the forms that are kept."""

import torch

from mpidist.comm.recorder import collective_begins as module
from mpidist.comm.recorder.collective_begins import CollectiveBegins
from mpidist.comm.recorder.ring import Ring


def form(*shape, dtype=torch.float32):
    return torch.Size(shape), dtype


def test_a_begin_knows_the_signature_and_the_bytes_of_its_form(monkeypatch):
    made = Ring(None, slots=8)
    begins = CollectiveBegins(made, made.group("world", "key", range(2)))
    recorded = []
    monkeypatch.setattr(
        begins, "_prepare", lambda signature, nbytes: recorded.append((signature, nbytes)) or id
    )
    gather = ("all_gather", (form(2),), (form(2), form(3)))
    half = form(4, 2, dtype=torch.bfloat16)
    for described in (gather, ("scatter", (half, half), (half,)), ("barrier", (), ()), gather):
        begins[described]
    signatures = [
        made.signature("collective", "all_gather", "world", "float32", (2,)),
        made.signature("collective", "scatter", "world", "bfloat16", (4, 2)),
        made.signature("collective", "barrier", "world"),
    ]
    assert recorded == list(zip(signatures, [20, 32, 0], strict=True))
    monkeypatch.setattr(module, "MOST", len(begins))
    assert begins["reduce", (form(1),), ()] is id
    assert ("reduce", (form(1),), ()) not in begins and len(begins) == 3
    made.close()
