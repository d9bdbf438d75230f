"""Hooks that torch attaches in C++, and names of profiler events."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.profiler import ProfilerActivity, profile

from mpidist.c10d import hooks
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=1)
of_214 = pytest.mark.skipif(not hasattr(c10d, "NanCheckHook"), reason="torch has them from 2.14 on")


@of_214
def test_an_attached_hook_sees_every_call(world, default_group):
    poisoned, fine = torch.full((3,), float("nan")), torch.ones(3)
    group = dist.new_group()
    dist.all_reduce(poisoned, group=group)
    hook = c10d.NanCheckHook.attach(group)
    calls = [
        lambda: dist.all_reduce(poisoned, group=group),
        lambda: dist.all_reduce(poisoned, group=group, async_op=True),
        lambda: dist.all_gather_single(torch.empty(3 * world.size), poisoned, group=group),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"(?i)nan"):
            call()
    dist.all_reduce(fine, group=group)
    hook.remove()
    dist.all_reduce(poisoned, group=group)
    agree(world, fine.tolist() == [world.size] * 3, str(fine))
    dist.destroy_process_group(group)


def test_hooks_are_replaced_once(world):
    attach = [getattr(c10d, name).attach for name in hooks._CLASSES if hasattr(c10d, name)]
    hooks.install()
    assert attach == [getattr(c10d, name).attach for name in hooks._CLASSES if hasattr(c10d, name)]


@pytest.mark.skipif(not hasattr(dist, "record_comm"), reason="torch has it from 2.13 on")
def test_record_comm_names_the_events(world, default_group):
    x = torch.ones(4)
    with profile(activities=[ProfilerActivity.CPU]) as done:
        with dist.record_comm("layer 1"):
            dist.all_reduce(x)
            work = dist.all_reduce(x, async_op=True)
        work.wait()
        dist.broadcast(x, 0)
    names = [event.name for event in done.events()]
    # Of an asynchronous call the profiler shows the issue, or the execution.
    agree(world, names.count("layer 1") >= 2, str(names))
    agree(world, "mpidist:broadcast" in names and "mpidist:all_reduce" not in names, str(names))
