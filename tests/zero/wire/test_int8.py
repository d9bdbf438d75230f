"""Int8 wire: exact masters, training as without a wire, and segments."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from mpidist import cache
from mpidist.comm.algorithms import host_copies, tuning
from mpidist.kernels.quantize import BLOCK
from mpidist.zero.wire import int8
from mpidist.zero.wire.formats import wire_of
from mpidist.zero.wire.int8 import Int8Wire, section_nbytes, segments_of
from tests.tools.support import agree
from tests.zero.wire import shares
from tests.zero.wire.shares import WIDE


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
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_int8_sends_changes_and_leaves_the_rest_in_the_master(group, device, dtype):
    # Two segments of the even shards, up to five of the ragged ones.
    wire = Int8Wire(1024)
    for turn, bounds in enumerate(shares.layouts(group.size)):
        masters, own, flat = shares.buffers(group, bounds, dtype, turn)
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
        agree(
            group, torch.equal(own, before) and shares.is_equal_everywhere(group, flat), str(bounds)
        )
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


@pytest.mark.mpi(min_size=2)
def test_segments_are_those_of_the_tuning_table(group, monkeypatch):
    """Rank 0's; without a table a constant. The values do not depend on them."""
    mebi, seen, flats = 1 << 20, [], []
    held = {
        "rows": [[1, list(tuning.ALGORITHMS)]],
        "source": f"rank {group.rank}",
        "segments": [[mebi, 512 << group.rank], [2 * mebi, 1024]],
    }
    cut = int8.segments_of
    monkeypatch.setattr(
        int8, "segments_of", lambda bounds, numel: (seen.append(numel), cut(bounds, numel))[1]
    )
    for table in (held, None):
        monkeypatch.setattr(cache, "load", lambda kind, key, table=table: table)
        fresh = group.clone("tuned" if table else "unmeasured")
        bounds = [rank * 2048 for rank in range(group.size + 1)]
        _, own, flat = shares.buffers(group, bounds, torch.float32)
        for _ in range(2):
            Int8Wire().share(fresh, own, flat, bounds)
        flats.append(flat)
        fresh.close()
    agree(group, seen == [512, 512, int8.SEGMENT_NUMEL, int8.SEGMENT_NUMEL], str(seen))
    agree(group, torch.equal(*flats) and shares.is_equal_everywhere(group, flats[0]))


def test_unmeasured_segments_of_a_device_fit_into_pinned_memory():
    cuda = torch.device("cuda", 0)
    for size in range(1, 129):
        segment = int8.unmeasured_segment(cuda, size)
        gathered = size * section_nbytes(segment)
        assert segment % BLOCK == 0 and int8.SEGMENT_NUMEL <= segment <= 4 << 20
        assert gathered <= host_copies.PINNED_BYTES or segment == int8.SEGMENT_NUMEL, size
    assert int8.unmeasured_segment(torch.device("cpu"), 2) == int8.SEGMENT_NUMEL


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
