"""Uneven inputs with a sharded optimizer: torch's Join and mpidist's join, against one process."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torchs
from torch.distributed.algorithms.join import Join

from mpidist.ddp.hooks.default import allreduce_hook
from mpidist.optim import OSS, ZeroRedundancyOptimizer, hook_with_zero_step
from tests.tools.support import agree, raises_on_all
from tests.zero.models import Model, backward, wrapped

pytestmark = pytest.mark.mpi


def inputs_of(rank):
    return 1 + 2 * rank


def reference(size):
    """Train in one process; ranks without inputs count as zeros, the scheduler counts all steps."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for step in range(inputs_of(size - 1)):
        optimizer.zero_grad()
        for rank in range(size):
            if step < inputs_of(rank):
                backward(model, rank, step, with_extra=True, scale=1 / size)
        optimizer.step()
        scheduler.step()
    return model


def ran(group, ddp, optimizer, clears_after, steps=True):
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for step in range(inputs_of(group.rank)):
        if not clears_after:
            optimizer.zero_grad()
        backward(ddp, group.rank, step, with_extra=True)
        if steps:
            optimizer.step()
        scheduler.step()
        if clears_after:
            optimizer.zero_grad(set_to_none=False)


def flat_parameters(ddp):
    """Return a copy of all parameters."""
    return torch.cat([parameter.detach().flatten() for parameter in ddp.module.parameters()])


def is_equal_on_all(group, flat):
    """Return whether all ranks hold the bits of this one."""
    rows = [torch.empty_like(flat) for _ in range(group.size)]
    group.all_gather(rows, flat)
    return all(torch.equal(row, flat) for row in rows)


@pytest.mark.usefixtures("default_group")
def test_a_rank_without_inputs_steps_its_shard(group):
    wrong = []
    expected = reference(group.size)
    for kind, way, partition, clears_after in (
        ("torch", "Join", "greedy", False),
        ("torch", "Join", "flat", True),
        ("torch", "hook", "flat", False),
        ("mpidist", "Join", "flat", True),
        ("mpidist", "hook", "greedy", False),
        ("mpidist", "join", "greedy", False),
        ("mpidist", "join and hook", "flat", True),
    ):
        ddp = wrapped(None, kind, Model())
        if way == "hook":
            zero = ZeroRedundancyOptimizer(
                ddp.parameters(),
                optimizer_class=torch.optim.SGD,
                overlap_with_ddp=True,
                partition=partition,
                lr=0.1,
                momentum=0.9,
            )
            its = torchs.allreduce_hook
            hook = hook_with_zero_step(allreduce_hook if kind == "mpidist" else its, ddp, zero)
            ddp.register_comm_hook(None, hook)
        else:
            zero = OSS(
                ddp.parameters(),
                partition=partition,
                lr=0.1,
                momentum=0.9,
            )
        if way == "join and hook":
            ddp.register_comm_hook(None, zero.stepping_hook(allreduce_hook))
        if way.startswith("join"):
            with ddp.join(optimizers=[zero]):
                ran(group, ddp, zero, clears_after)
        else:
            with Join([ddp, zero]):
                ran(group, ddp, zero, clears_after, way != "hook")
        far = [
            name
            for (name, a), b in zip(
                ddp.module.named_parameters(), expected.parameters(), strict=True
            )
            if not torch.allclose(a, b, rtol=1e-4, atol=1e-5)
        ]
        is_equal = is_equal_on_all(group, flat_parameters(ddp))
        if far or not is_equal:
            wrong.append(f"{kind} {way} {partition}: {far}, equal on all ranks: {is_equal}")
    agree(group, not wrong, "; ".join(wrong))


@pytest.mark.mpi(min_size=2)
def test_an_early_end_raises_on_all(group):
    ddp = wrapped(group, "mpidist", Model(), find_unused_parameters=True)
    oss = OSS(ddp.parameters(), torch.optim.SGD, group, lr=0.1)

    def run():
        with ddp.join(throw_on_early_termination=True, optimizers=[oss]):
            ran(group, ddp, oss, False)

    raises_on_all(group, RuntimeError, run, "exhausted")
    before = flat_parameters(ddp)
    backward(ddp, group.rank, 0)
    oss.step()
    after = flat_parameters(ddp)
    agree(group, oss.before_step is None and not torch.equal(before, after), "no step was taken")
    agree(group, is_equal_on_all(group, after), "ranks hold different parameters")


@pytest.mark.mpi
def test_an_optimizer_that_join_does_not_list_is_refused(group):
    ddp = wrapped(group, "mpidist", Model(), find_unused_parameters=True)
    oss = OSS(ddp.parameters(), torch.optim.SGD, group, lr=0.1)

    def run():
        with ddp.join():
            ran(group, ddp, oss, False)

    raises_on_all(group, RuntimeError, run, "pass join(optimizers")
    backward(ddp, group.rank, 0)
    oss.step()  # allowed after the join
