"""Wires: equal bits on all ranks after a share, exact masters, and training as without a wire."""

import copy
import threading
from itertools import pairwise

import numpy as np
import pytest
import torch

from mpidist import cache
from mpidist.comm.algorithms import host_copies, tuning
from mpidist.kernels.quantize import BLOCK
from mpidist.zero import wire_int8, wire_memory
from mpidist.zero.wire import wire_of
from mpidist.zero.wire_half import HalfWire
from mpidist.zero.wire_int8 import Int8Wire, section_nbytes, segments_of
from tests.support import agree, raises_on_all

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


def change_by_numpy(change):
    """Return a change as the wire sends it, block by block."""
    change, sent = change.cpu().numpy(), np.zeros(change.shape, change.cpu().numpy().dtype)
    for start in range(0, len(change), BLOCK):
        own = change[start : start + BLOCK]
        scale = np.float32(np.abs(own).max() / own.dtype.type(127)).astype(own.dtype)
        if scale > 0:
            sent[start : start + BLOCK] = np.rint(own * (1 / scale)) * scale
    return torch.from_numpy(sent)


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


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_int8_sends_changes_and_leaves_the_rest_in_the_master(group, device, dtype):
    # Two segments of the even shards, up to five of the ragged ones.
    wire = Int8Wire(1024)
    for turn, bounds in enumerate(layouts(group.size)):
        masters, own, flat = buffers(group, bounds, dtype, turn)
        before, wanted = own.clone(), flat.cpu()
        for _ in range(3):  # the first sends the change, the others the rest
            for master, (start, stop) in zip(masters, pairwise(bounds), strict=True):
                shard = wanted[start:stop]
                shard.copy_(master) if group.size == 1 else shard.add_(
                    change_by_numpy(master.cpu() - shard)
                )
            wire.share(group, own, flat, bounds)
            agree(
                group,
                torch.equal(flat.cpu(), wanted),
                f"{bounds}: {(flat.cpu() - wanted).abs().max()}",
            )
        agree(group, torch.equal(own, before) and is_equal_everywhere(group, flat), str(bounds))
        # Each share leaves a hundredth of steps near 0.01.
        left = [0.0, *(torch.cat(masters) - flat[bounds[0] : bounds[-1]]).abs().tolist()]
        agree(group, max(left) <= 4 * torch.finfo(dtype).eps + 5e-8, f"{max(left)}")


@pytest.mark.mpi
def test_many_small_changes_arrive_whole(group):
    """A hundred steps, each too small for the scale of its block."""
    wire, bounds = Int8Wire(), [rank * 64 for rank in range(group.size + 1)]
    master, flat = torch.zeros(64), torch.zeros(bounds[-1])
    for turn in range(100):
        master += 1e-3
        master[0] += 1.0 if turn % 2 else -1.0
        wire.share(group, master, flat, bounds)
    gathered = flat.view(group.size, 64)[:, 1:]
    agree(
        group,
        bool(((gathered - 0.1).abs() <= 0.5 / 127 + 1e-6).all()),
        f"{gathered.min()} to {gathered.max()} of 0.1",
    )


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["bf16", "fp16", "int8"])
def test_what_is_not_finite_is_seen_on_all_ranks(group, name):
    bounds = [rank * 512 for rank in range(group.size + 1)]
    for bad in (torch.nan, torch.inf):
        _, own, flat = buffers(group, bounds, torch.float32)
        if group.rank == 1:
            own[300] = bad
        wire_of(name).share(group, own, flat, bounds)
        lost = (~flat.isfinite()).nonzero().flatten().tolist()
        agree(
            group,
            lost == (list(range(512 + 256, 1024)) if name == "int8" else [512 + 300]),
            f"{bad}: {lost[:3]} … of {len(lost)}",
        )
        agree(group, is_equal_everywhere(group, flat))


@pytest.mark.mpi
def test_bad_arguments_are_refused_on_all_ranks_before_anything_is_sent(group):
    size, int8, half = group.size, Int8Wire(), HalfWire(torch.bfloat16)
    bounds = [rank * 64 for rank in range(size + 1)]

    def refused(error, match, wire, master=None, flat=None, offsets=None):
        master = torch.zeros(64) if master is None else master
        flat = torch.zeros(64 * size) if flat is None else flat
        raises_on_all(
            group, error, lambda: wire.share(group, master, flat, offsets or bounds), match
        )

    for wire in (int8, half):
        refused(ValueError, "ascending bounds", wire, offsets=bounds[:-1])
        refused(ValueError, "ascending bounds", wire, offsets=[*bounds[:-1], 64 * size + 1])
        refused(ValueError, "ascending bounds", wire, offsets=[-64, *bounds[1:]])
        refused(ValueError, "master of 64 elements", wire, torch.zeros(63))
        refused(ValueError, "one dimension", wire, flat=torch.zeros(size, 64))
        refused(ValueError, "contiguous master", wire, torch.zeros(128)[::2])
        refused(TypeError, "master of flat's dtype", wire, torch.zeros(64, dtype=torch.float64))
        refused(TypeError, "complex64", wire, flat=torch.zeros(64 * size, dtype=torch.complex64))
    refused(TypeError, "float16", int8, flat=torch.zeros(64 * size, dtype=torch.float16))
    refused(TypeError, "float16", half, flat=torch.zeros(64 * size, dtype=torch.float16))


@pytest.mark.mpi
def test_memory_is_kept_and_buffers_do_not_meet(group):
    bounds = [rank * 640 for rank in range(group.size + 1)]
    for name in ("fp16", "int8"):
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


def train(group, optimizer, lr, share):
    """Fit a linear model with eight outputs by 60 steps; return the loss of seven of them.

    The gradients of the eighth are noise, two orders larger, and lie in the same blocks.
    """
    torch.manual_seed(0)
    x = torch.randn(512, 32)
    y = x @ torch.randn(32, 8) + 0.5 * torch.randn(512, 8)
    y[:, 0] = 300 * torch.randn(512)
    flat, size = torch.zeros(256), group.size
    bounds = [*(64 * (4 * rank // size) for rank in range(size)), 256]
    master = flat if share is None else torch.zeros(bounds[group.rank + 1] - bounds[group.rank])
    mine = slice(0, 256) if share is None else slice(bounds[group.rank], bounds[group.rank + 1])
    parameter = torch.nn.Parameter(master)
    step = optimizer([parameter], lr=lr)
    for turn in range(60):
        some = slice(turn * 32 % 512, turn * 32 % 512 + 32)
        parameter.grad = (
            (x[some].T @ (x[some] @ flat.view(32, 8) - y[some]) / 32).view(-1)[mine].clone()
        )
        step.step()
        if share is not None:
            share(group, parameter.detach(), flat, bounds)
    return float((x @ flat.view(32, 8) - y)[:, 1:].square().mean())


class Forgetful:
    """Wire without error feedback: quantizes each step of the master separately."""

    def __init__(self):
        self.last, self.wire = None, Int8Wire()

    def share(self, group, master, flat, bounds):
        last, steps = (
            torch.zeros_like(master) if self.last is None else self.last,
            torch.zeros_like(flat),
        )
        self.last = master.clone()
        self.wire.share(group, master - last, steps, bounds)
        flat += steps


def share_weights(group, master, flat, bounds):
    """Quantize the parameters themselves, as ZeRO++ does."""
    flat.zero_()
    Int8Wire().share(group, master, flat, bounds)


@pytest.mark.mpi(min_size=2)
def test_training_ends_where_it_would_without_a_wire_because_errors_are_fed_back(group):
    sgd, adam = torch.optim.SGD, torch.optim.Adam
    alone = train(group, sgd, 0.05, None)
    losses = {
        name: train(group, sgd, 0.05, wire_of(name).share) / alone for name in ("bf16", "int8")
    }
    agree(group, all(0.97 < ratio < 1.03 for ratio in losses.values()), f"{losses} of {alone}")
    forgetful = train(group, sgd, 0.05, Forgetful().share) / alone
    agree(group, forgetful > 1.4, f"{forgetful} times the loss: the errors do not matter here")
    # Adam's steps have equal sizes, the parameters do not.
    alone = train(group, adam, 0.1, None)
    changes, weights = (
        train(group, adam, 0.1, share) / alone for share in (Int8Wire().share, share_weights)
    )
    agree(
        group,
        0.999 < changes < 1.001 and weights > 1.005,
        f"{changes}, and {weights} by sending parameters",
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_bytes_of_the_busiest_rank(size):
    for bounds in layouts(size):
        parts = [stop - start for start, stop in pairwise(bounds)]
        for wire, nbytes in (
            (HalfWire(torch.float16), lambda numel: 2 * numel),
            (Int8Wire(), section_nbytes),
        ):
            sizes = [nbytes(part) for part in parts]
            busiest = max(
                sum(sizes[peer] + sizes[rank] for peer in range(size) if peer != rank)
                for rank in range(size)
            )
            assert wire.nbytes(bounds) == busiest
    assert [section_nbytes(numel) for numel in (0, 64, 256, 320, 1 << 20)] == [
        0,
        80,
        272,
        336,
        (1 << 20) + (1 << 14),
    ]


@pytest.mark.mpi(min_size=2)
def test_segments_are_those_of_the_tuning_table(group, monkeypatch):
    """Rank 0's; without a table a constant. The values do not depend on them."""
    mebi, seen, flats = 1 << 20, [], []
    held = {
        "rows": [[1, list(tuning.ALGORITHMS)]],
        "source": f"rank {group.rank}",
        "segments": [[mebi, 512 << group.rank], [2 * mebi, 1024]],
    }
    cut = wire_int8.segments_of
    monkeypatch.setattr(
        wire_int8, "segments_of", lambda bounds, numel: (seen.append(numel), cut(bounds, numel))[1]
    )
    for table in (held, None):
        monkeypatch.setattr(cache, "load", lambda kind, key, table=table: table)
        fresh = group.clone("tuned" if table else "unmeasured")
        bounds = [rank * 2048 for rank in range(group.size + 1)]
        _, own, flat = buffers(group, bounds, torch.float32)
        for _ in range(2):
            Int8Wire().share(fresh, own, flat, bounds)
        flats.append(flat)
        fresh.close()
    agree(group, seen == [512, 512, wire_int8.SEGMENT_NUMEL, wire_int8.SEGMENT_NUMEL], str(seen))
    agree(group, torch.equal(*flats) and is_equal_everywhere(group, flats[0]))


def test_unmeasured_segments_of_a_device_fit_into_pinned_memory():
    cuda = torch.device("cuda", 0)
    for size in range(1, 129):
        segment = wire_int8.unmeasured_segment(cuda, size)
        gathered = size * section_nbytes(segment)
        assert segment % BLOCK == 0 and wire_int8.SEGMENT_NUMEL <= segment <= 4 << 20
        assert gathered <= host_copies.PINNED_BYTES or segment == wire_int8.SEGMENT_NUMEL, size
    assert wire_int8.unmeasured_segment(torch.device("cpu"), 2) == wire_int8.SEGMENT_NUMEL


def test_segments_hold_each_element_once_and_whole_blocks():
    bounds = [64, 64, 3264, 3328, 5376]
    segments = segments_of(bounds, 1024)
    assert len(segments) == 4 and segments_of([5, 5, 5], 1024) == []
    assert segments[1] == [(64, 64), (1088, 2112), (3328, 3328), (4352, 5376)]
    for rank, (start, stop) in enumerate(pairwise(bounds)):
        spans = [spans[rank] for spans in segments]
        assert [place for first, last in spans for place in range(first, last)] == list(
            range(start, stop)
        )
        assert all((first - start) % BLOCK == 0 for first, last in spans if first < last)
        assert sum(section_nbytes(last - first) for first, last in spans) == section_nbytes(
            stop - start
        )


def test_wires_by_name():
    for names, kind, dtype in (
        (("bf16", torch.bfloat16), HalfWire, torch.bfloat16),
        (("fp16", torch.float16), HalfWire, torch.float16),
    ):
        for name in names:
            wire = wire_of(name)
            assert isinstance(wire, kind) and wire.dtype is dtype and wire.name == names[0]
    assert wire_of(None) is None
    assert (
        isinstance(wire_of("int8"), Int8Wire)
        and wire_of(torch.int8).name == "int8"
        and wire_of("int8") is not wire_of("int8")
    )
    for unknown in ("fp8", torch.float32, 8, [], True):
        with pytest.raises(ValueError, match=r"'bf16', 'fp16', 'int8', torch\.bfloat16"):
            wire_of(unknown)
    with pytest.raises(ValueError, match=r"torch\.float32"):
        HalfWire(torch.float32)


def test_dtypes_of_masters():
    for name, carried in (
        ("bf16", [*WIDE, torch.bfloat16]),
        ("fp16", [*WIDE, torch.float16]),
        ("int8", WIDE),
    ):
        for dtype in (*WIDE, *HALF, torch.complex64, torch.int64):
            if dtype in carried:
                assert wire_of(name).master_dtype(dtype) is dtype
            else:
                with pytest.raises(
                    TypeError, match=f"the wire {name} carries .*; got parameters of {dtype}"
                ):
                    wire_of(name).master_dtype(dtype)


def test_scratch_grows_and_is_a_threads_own():
    scratch, cpu = wire_memory.Scratch(), torch.device("cpu")
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
    wire = copy.deepcopy(Int8Wire())
    assert wire._scratch._held == {}
