"""Mixed groups: the backend that each call goes to.

The other backend is a stand-in for meta tensors.
"""

import inspect
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mpidist.c10d.collectives import OPERATORS
from mpidist.c10d.routing import device_of
from mpidist.c10d.up_to_213 import batches, functional, overrides
from mpidist.c10d.up_to_213.process_group import OLD_NAMES, TorchProcessGroup
from mpidist.c10d.work import ENDED
from mpidist.comm.group import ProcessGroup
from tests.tools.support import agree, raises_on_all


def test_every_call_with_tensors_is_routed():
    native = {"barrier", "monitored_barrier", "set_timeout", "shutdown", "abort"}
    calls = {name for name, _ in inspect.getmembers(dist.ProcessGroup) if not name.startswith("__")}
    ours = {
        name
        for name in vars(TorchProcessGroup)
        if name in calls and inspect.isfunction(getattr(TorchProcessGroup, name))
    }
    about = {
        "name",
        "get_group_store",
        "_start_coalescing",
        "_end_coalescing",
        "_get_backend",
        "_set_default_timeout",
    }
    assert ours - native - about <= {*OPERATORS, *OLD_NAMES}


def test_a_call_goes_to_the_device_of_its_first_tensor():
    assert device_of([[[]], [torch.empty(2, device="meta")], torch.ones(1)]) == "meta"
    assert device_of([torch.ones(1), 3]) == "cpu"
    assert device_of([[], None, 1]) is None


class StandIn:
    """Records the names of its calls."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append(name)
            return ENDED

        return call

    def _get_backend(self, device):
        def set_timeout(timeout):
            self.calls.append(f"timeout {timeout.total_seconds():g}")

        return SimpleNamespace(
            supports_coalescing=True, supports_splitting=False, _set_default_timeout=set_timeout
        )


@pytest.fixture
def shared(world):
    """torch's default group on ``cpu:mpidist,meta:gloo``, with a stand-in for gloo."""
    world.barrier()
    dist.init_process_group("cpu:mpidist,meta:gloo", init_method="mpi://")
    group = dist.group.WORLD
    real, other = (group._held, group._others), StandIn()
    group._held, group._others = other, {"gloo": (None, other._get_backend(None))}
    yield group
    world.barrier()
    group._held, group._others = real
    dist.destroy_process_group()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_ask_for_different_backends_raise(world):
    named = "mpidist" if world.rank == 0 else "cpu:mpidist,meta:gloo"
    raises_on_all(
        world, ValueError, lambda: dist.init_process_group(named), "rank 1: cpu:mpidist,meta:gloo"
    )
    agree(world, not dist.is_initialized())


@pytest.mark.mpi(min_size=1)
def test_calls_go_by_device(world, shared):
    size, other = world.size, shared._held
    one, all_of = torch.ones(2, device="meta"), torch.ones(2 * size, device="meta")
    parts = list(all_of.chunk(size))
    calls = [
        lambda: dist.all_reduce(one),
        lambda: dist.reduce(one, 0),
        lambda: dist.broadcast(one, 0),
        lambda: dist.all_gather(parts, one),
        lambda: dist.all_gather_into_tensor(all_of, one),
        lambda: dist.reduce_scatter(one, parts),
        lambda: dist.reduce_scatter_tensor(one, all_of),
        lambda: dist.all_to_all(parts, parts),
        lambda: dist.all_to_all_single(all_of, all_of),
        lambda: dist.gather(one, parts if world.rank == 0 else None, 0),
        lambda: dist.scatter(one, parts if world.rank == 0 else None, 0),
        lambda: dist.all_reduce(one, async_op=True).wait(),
        lambda: shared.barrier(_barrier_on("meta")).wait(),
    ]
    for call in calls:
        call()
    agree(world, len(other.calls) == len(calls), str(other.calls))
    # On the host the same calls are ours.
    total, gathered = torch.full((2,), float(world.rank)), [None] * size
    dist.all_reduce(total)
    dist.all_gather_object(gathered, world.rank)
    dist.barrier()
    shared.barrier(_barrier_on("cpu")).wait()
    shared.monitored_barrier()
    agree(
        world,
        total[0] == sum(range(size))
        and gathered == list(range(size))
        and len(other.calls) == len(calls),
    )
    with pytest.raises(
        TypeError, match=r"a tensor on xpu, .* cpu \(mpidist\) and meta \(gloo\) alone"
    ):
        shared.coalesces(torch.device("xpu"))


@pytest.mark.mpi(min_size=1)
def test_a_mixed_group_has_the_devices_backends_and_timeout_that_torch_reads(world, shared):
    kinds = [device.type for device in shared._device_types]
    agree(
        world,
        kinds == ["cpu", "meta"] and dist.get_backend() == "cpu:mpidist,meta:gloo",
        f"{kinds} {dist.get_backend()}",
    )
    agree(
        world,
        isinstance(shared.native, ProcessGroup)
        and shared._get_backend(torch.device("meta")).supports_coalescing,
    )
    shared.set_timeout(timedelta(seconds=50))
    agree(
        world,
        shared.native.timeout_s == 50 and shared._held.calls == ["timeout 50"],
        str(shared._held.calls),
    )


@pytest.mark.mpi(min_size=1)
def test_a_batch_of_messages_is_started_as_one(world, shared, monkeypatch):
    for module in (dist, dist.distributed_c10d):
        monkeypatch.setattr(module, "batch_isend_irecv", module.batch_isend_irecv)
    monkeypatch.setattr(overrides, "_overridden", set())
    batches.install()
    tensor = torch.ones(2, device="meta")
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for device, expected in (
        ("meta", ["_start_coalescing", "send", "recv", "_end_coalescing"]),
        ("cpu", []),
    ):
        got = tensor if device == "meta" else torch.empty(2)
        sent = tensor if device == "meta" else torch.full((2,), float(world.rank))
        if world.size == 1:  # torch refuses messages to oneself
            continue
        shared._held.calls.clear()
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, got, left)]
        ):
            work.wait()
        agree(
            world,
            shared._held.calls == expected and (device == "meta" or got[0] == left),
            str(shared._held.calls),
        )
    # The same for the operator that compiled code calls.
    monkeypatch.setattr(functional, "_register_work", lambda tensor, work: tensor)
    shared._held.calls.clear()
    functional._batch_p2p_ops(
        ["isend", "irecv"], [right, left], [0, 0], [tensor, tensor], shared.group_name
    )
    expected = ["_start_coalescing", "send", "recv", "_end_coalescing"]
    agree(world, shared._held.calls == expected, str(shared._held.calls))


def _barrier_on(device):
    options = dist.BarrierOptions()
    options.device = torch.device(device)
    return options
