"""Half-precision wires: all ranks see the rounded masters, with equal bits."""

from __future__ import annotations

import copy
import threading
from itertools import pairwise

import pytest
import torch

from mpidist.zero.shards.half_wire import HalfWire, Scratch, wire_of
from tests.tools.support import agree, raises_on_all

HALF = [torch.bfloat16, torch.float16]
WIDE = [torch.float32, torch.float64]


def layouts(size):
    """Return bounds: even, ragged (after 64 unowned elements) and empty shards, no elements."""
    ragged = [64, *(64 + 320 * rank * rank for rank in range(1, size + 1))]
    return [
        [rank * 2048 for rank in range(size + 1)],
        ragged,
        [0] * size + [1024],
        [0, *[64] * size],
        [128] * (size + 1),
    ]


def buffers(group, bounds, dtype, turn=0):
    """Return all ranks' masters, this rank's master, and the flat buffer."""
    torch.manual_seed(turn)
    flat = torch.randn(bounds[-1] + 100).to(dtype)
    masters = [
        flat[start:stop] + torch.randn(stop - start).to(dtype) * 0.01
        for start, stop in pairwise(bounds)
    ]
    return masters, masters[group.rank].clone(), flat


def is_equal_everywhere(group, flat):
    everyones = group.all_gather_object(flat.cpu().view(torch.uint8).numpy().tobytes())
    return all(one == everyones[0] for one in everyones)


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


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_halves_are_the_rounded_masters_on_all_ranks(group, device, dtype):
    wire = HalfWire(dtype)
    for flat_dtype in (*WIDE, dtype):
        for turn, bounds in enumerate(layouts(group.size)):
            masters, own, flat = buffers(group, bounds, flat_dtype, turn)
            wanted, before = flat.clone(), own.clone()
            wanted[bounds[0] : bounds[-1]] = (
                torch.cat(masters)
                if group.size == 1
                else torch.cat(masters).to(dtype).to(flat_dtype)
            )
            wire.share(group, own, flat, bounds)
            agree(
                group,
                torch.equal(flat, wanted) and torch.equal(own, before),
                f"{flat_dtype} at {bounds}",
            )
    # Without rounding the master may be the shard itself.
    masters, own, flat = buffers(group, bounds := layouts(group.size)[1], dtype)
    shard = flat[bounds[group.rank] : bounds[group.rank + 1]].copy_(own)
    wire.share(group, shard, flat, bounds)
    agree(group, torch.equal(flat[bounds[0] : bounds[-1]], torch.cat(masters)))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_what_is_not_finite_is_seen_on_all_ranks(group, name):
    bounds = [rank * 512 for rank in range(group.size + 1)]
    for bad in (torch.nan, torch.inf):
        _, own, flat = buffers(group, bounds, torch.float32)
        if group.rank == 1:
            own[300] = bad
        wire_of(name).share(group, own, flat, bounds)
        lost = (~flat.isfinite()).nonzero().flatten().tolist()
        agree(group, lost == [512 + 300], f"{bad}: {lost[:3]} … of {len(lost)}")
        agree(group, is_equal_everywhere(group, flat))


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
            [buffers(group, bounds, dtype, turn)[1:] for turn, dtype in enumerate(WIDE)]
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
