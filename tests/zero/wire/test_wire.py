"""Wires of every format: equal bits on all ranks, refused arguments, and memory."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

from mpidist.zero.wire.formats import wire_of
from mpidist.zero.wire.half import HalfWire
from mpidist.zero.wire.wire import Scratch
from tests.tools.support import agree, raises_on_all
from tests.zero.wire import shares
from tests.zero.wire.shares import WIDE


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_what_is_not_finite_is_seen_on_all_ranks(group, name):
    bounds = [rank * 512 for rank in range(group.size + 1)]
    for bad in (torch.nan, torch.inf):
        _, own, flat = shares.buffers(group, bounds, torch.float32)
        if group.rank == 1:
            own[300] = bad
        wire_of(name).share(group, own, flat, bounds)
        lost = (~flat.isfinite()).nonzero().flatten().tolist()
        agree(group, lost == [512 + 300], f"{bad}: {lost[:3]} … of {len(lost)}")
        agree(group, shares.is_equal_everywhere(group, flat))


@pytest.mark.mpi
def test_bad_arguments_are_refused_on_all_ranks_before_anything_is_sent(group):
    size, wire = group.size, HalfWire(torch.bfloat16)
    bounds = [rank * 64 for rank in range(size + 1)]

    def refused(error, match, master=None, flat=None, offsets=None):
        master = torch.zeros(64) if master is None else master
        flat = torch.zeros(64 * size) if flat is None else flat
        raises_on_all(
            group, error, lambda: wire.share(group, master, flat, offsets or bounds), match
        )

    refused(ValueError, "ascending bounds", offsets=bounds[:-1])
    refused(ValueError, "ascending bounds", offsets=[*bounds[:-1], 64 * size + 1])
    refused(ValueError, "ascending bounds", offsets=[-64, *bounds[1:]])
    refused(ValueError, "master of 64 elements", torch.zeros(63))
    refused(ValueError, "one dimension", flat=torch.zeros(size, 64))
    refused(ValueError, "contiguous master", torch.zeros(128)[::2])
    refused(TypeError, "master of flat's dtype", torch.zeros(64, dtype=torch.float64))
    refused(TypeError, "complex64", flat=torch.zeros(64 * size, dtype=torch.complex64))
    refused(TypeError, "float16", flat=torch.zeros(64 * size, dtype=torch.float16))


@pytest.mark.mpi
def test_memory_is_kept_and_buffers_do_not_meet(group):
    bounds = [rank * 640 for rank in range(group.size + 1)]
    for name in ("bf16", "fp16"):
        one, alone = wire_of(name), [wire_of(name), wire_of(name)]
        sets = [
            [shares.buffers(group, bounds, dtype, turn)[1:] for turn, dtype in enumerate(WIDE)]
            for _ in range(2)
        ]
        places = []
        for _ in range(2):
            for own, (master, flat), (twin, other) in zip(alone, *sets, strict=True):
                one.share(group, master, flat, bounds)
                own.share(group, twin, other, bounds)
                agree(group, torch.equal(flat, other))
                places += [held.data_ptr() for held in one._scratch._held.values()]
        agree(
            group,
            len(places) == (0 if group.size == 1 else 4) and len(set(places)) <= 1,
            f"{name}: {places}",
        )


def test_scratch_grows_and_is_a_threads_own():
    scratch, cpu = Scratch(), torch.device("cpu")
    first = scratch.take(1000, cpu)
    assert first.shape == (1000,) and first.dtype is torch.uint8
    assert scratch.take(400, cpu).data_ptr() == first.data_ptr() and scratch.take(
        400, cpu
    ).shape == (400,)
    grown = scratch.take(2000, cpu)
    assert scratch.take(1000, cpu).data_ptr() == grown.data_ptr()
    others = []
    thread = threading.Thread(target=lambda: others.append(scratch.take(1000, cpu)))
    thread.start()
    thread.join()
    assert others[0].data_ptr() != grown.data_ptr()
    wire = copy.deepcopy(wire_of("bf16"))
    assert wire._scratch._held == {}
