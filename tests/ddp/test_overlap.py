"""Overlap between nodes: buckets are reduced while the backward pass runs."""

import threading
import time
from typing import ClassVar

import pytest
import torch

from mpidist.comm.algorithms import reductions
from mpidist.ddp.module import DistributedDataParallel
from tests.tools.support import agree

pytestmark = pytest.mark.mpi

PARTS = 5


class Slow(torch.autograd.Function):
    """Identity whose backward sleeps, or waits for ``event`` and records whether it was set."""

    waits: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx, x, event):
        ctx.event = event
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.event is not None:
            Slow.waits.append(ctx.event.wait(10))
        else:
            time.sleep(0.01)
        return gradient, None


class Branches(torch.nn.Module):
    """Independent parameters; autograd reaches the first used parameter last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weights = torch.nn.ParameterList([torch.randn(40) for _ in range(PARTS)])

    def forward(self, order, event=None):
        total = torch.zeros(())
        for number, place in enumerate(order):
            total = total + Slow.apply(
                self.weights[place], event if number == 0 else None
            ).square().sum() * (place + 1)
        return total


@pytest.fixture
def record(group, monkeypatch):
    """Reduce on the group's thread, and record the begin and end of each gradient's reduction."""
    monkeypatch.setattr(type(group), "is_single_node", False)
    noted, reduce = [], reductions.all_reduce

    def noting(comm, inputs, outputs, *args):
        is_bucket = outputs[0].numel() == 40
        if is_bucket:
            noted.append("begin")
            began.set()
        reduce(comm, inputs, outputs, *args)
        if is_bucket:
            noted.append("end")
            ended.set()

    began, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(reductions, "all_reduce", noting)
    return noted, began, ended


def right(ddp):
    """Return whether the gradients are those of one rank, which are the same on all ranks."""
    return all(
        torch.allclose(own.grad, 2 * (place + 1) * weight, rtol=1e-5)
        for place, (own, weight) in enumerate(
            zip(ddp.module.weights, Branches().weights, strict=True)
        )
    )


def test_bucket_0_is_reduced_before_backward_ends(group, record):
    noted, _, ended = record
    ddp = DistributedDataParallel(Branches(), process_group=group, bucket_cap_mb=1e-5)
    for _ in range(2):  # the second pass is in ready order
        ddp.zero_grad()
        ddp(range(PARTS)).backward()
    for old in (noted, ended, Slow.waits):
        old.clear()
    ddp.zero_grad()
    # The last branch waits until a reduction has ended, which never happens without overlap.
    ddp(range(PARTS), ended).backward()
    agree(
        group,
        Slow.waits == [True] and len(noted) == 2 * PARTS and len(ddp.reducer.layout.plan) == PARTS,
        str(noted),
    )
    agree(group, noted == ["begin", "end"] * PARTS and right(ddp))


def test_one_rank_in_reverse_holds_no_other_up(group, record):
    noted, began, _ = record
    is_reversed = group.size > 1 and group.rank == group.size - 1
    order = range(PARTS - 1, -1, -1) if is_reversed else range(PARTS)
    ddp = DistributedDataParallel(Branches(), process_group=group, bucket_cap_mb=1e-5)
    for _ in range(2):
        ddp.zero_grad()
        ddp(order).backward()
    for old in (noted, began, Slow.waits):
        old.clear()
    ddp.zero_grad()
    ddp(order, None if is_reversed else began).backward()
    agree(group, Slow.waits == ([] if is_reversed else [True]) and right(ddp), str(noted))
    plans = group.all_gather_object(ddp.bucket_plan())
    agree(group, all(plan == plans[0] for plan in plans), "other buckets")
