"""Events of calls in torch.profiler."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import mpidist.rpc as rpc
from mpidist.rpc import api
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=1)


def larger(a, b):
    return max(a, b)


def fail():
    raise KeyError("on purpose")


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_calls_have_the_names_that_torch_gives_them(group, workers, to):
    rpc.rpc_sync(to, max, args=(1, 2))  # without a profiler
    with profile(activities=[ProfilerActivity.CPU]) as done:
        assert rpc.rpc_sync(to, torch.add, args=(torch.ones(1), 1)).item() == 2
        assert rpc.rpc_async(to, scripted, args=(torch.ones(1),)).wait().item() == 2
        assert rpc.remote(to, larger, args=(1, 2)).to_here() == 2
        for wrong in (fail, 3):
            with pytest.raises((KeyError, TypeError)):
                rpc.rpc_sync(to, wrong)
        rpc.rpc_sync(to, functools.partial(max, 1), args=(2,))
    found = {
        event.key: event.count for event in done.key_averages() if event.key.startswith("rpc_")
    }
    ends = f"({workers[group.rank]} -> {to})"
    script = torch._jit_internal._qualified_name(scripted)
    names = (
        "sync#aten::add",
        f"async#{script}",
        "remote#larger",
        "sync#fail",
        "sync#int",
        "sync#partial",
    )
    expected = {f"rpc_{name}{ends}": 1 for name in names}
    agree(group, found == expected, f"{found}, not {expected}")


def test_without_a_profiler_nothing_is_made(group, workers, to, monkeypatch):
    monkeypatch.setattr(api, "_record_calls", None)
    assert rpc.rpc_sync(to, max, args=(1, 2)) == rpc.rpc_async(to, max, args=(1, 2)).wait() == 2
