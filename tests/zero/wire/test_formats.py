"""Wire formats by name, and the dtypes that they carry."""

from __future__ import annotations

import pytest
import torch

from mpidist.zero.wire.formats import wire_of
from mpidist.zero.wire.half import HalfWire
from tests.zero.wire.shares import HALF, WIDE


def test_wires_by_name():
    for names, kind, dtype in (
        (("bf16", torch.bfloat16), HalfWire, torch.bfloat16),
        (("fp16", torch.float16), HalfWire, torch.float16),
    ):
        for name in names:
            wire = wire_of(name)
            assert isinstance(wire, kind) and wire.dtype is dtype and wire.name == names[0]
    assert wire_of(None) is None
    assert wire_of("bf16") is not wire_of("bf16")
    for unknown in ("fp8", torch.float32, 8, [], True):
        with pytest.raises(ValueError, match=r"'bf16', 'fp16', torch\.bfloat16"):
            wire_of(unknown)
    with pytest.raises(ValueError, match=r"torch\.float32"):
        HalfWire(torch.float32)


def test_dtypes_of_masters():
    for name, carried in (
        ("bf16", [*WIDE, torch.bfloat16]),
        ("fp16", [*WIDE, torch.float16]),
    ):
        for dtype in (*WIDE, *HALF, torch.complex64, torch.int64):
            if dtype in carried:
                wire_of(name).require(dtype)
            else:
                with pytest.raises(
                    TypeError, match=f"the wire {name} carries .*; got parameters of {dtype}"
                ):
                    wire_of(name).require(dtype)
