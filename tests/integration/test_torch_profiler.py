"""torch.profiler, CommDebugMode and other dispatch modes on groups of mpidist and of Gloo."""

import json

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as functional
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from mpidist import ddp as mddp
from tests.tools.support import agree, raises_on_all

# torch renames its functions
pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(scope="module")
def groups(world):
    """torch's default group on mpidist, and a group of Gloo with the same ranks."""
    dist.init_process_group("mpidist")
    yield dist.group.WORLD, dist.new_group(backend="gloo")
    world.barrier()
    dist.destroy_process_group()


def own_events(done, tmp_path):
    """Return (name, shapes) of mpidist's events in a trace, without waits."""
    path = tmp_path / "trace.json"
    done.export_chrome_trace(str(path))
    events = [
        e
        for e in json.loads(path.read_text())["traceEvents"]
        if e.get("ph") == "X" and e["name"].startswith("mpidist:")
    ]
    events = [e for e in events if not e["name"].endswith(":wait")]
    return [(e["name"], e["args"].get("Input Dims")) for e in sorted(events, key=lambda e: e["ts"])]


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


def pass_through(module):
    module(torch.ones(3, 4)).sum().backward()


def test_the_trace_of_torch_s_calls(world, groups, tmp_path):
    t = torch.ones(2, 3)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as done:
        dist.all_reduce(t)
        dist.all_reduce(t, async_op=True).wait()
        dist.all_gather([torch.empty(2, 3) for _ in range(world.size)], t)
        dist.barrier()
    found = own_events(done, tmp_path)
    shapes = [[2, 3]]
    expected = [
        ("all_reduce", shapes),
        ("all_reduce", shapes),
        ("all_gather", shapes),
        ("barrier", None),
    ]
    agree(world, found == [("mpidist:" + name, dims) for name, dims in expected], str(found))


def test_the_trace_of_data_parallel_passes(world, groups, tmp_path):
    theirs = torch.nn.parallel.DistributedDataParallel(model())
    ours = mddp.DistributedDataParallel(model())
    for module in (theirs, ours):
        pass_through(module)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as done:
        pass_through(theirs)
    found = own_events(done, tmp_path)
    agree(world, ("mpidist:all_reduce", [[40]]) in found, f"torch's DDP: {found}")
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as done:
        pass_through(ours)
    # Within a node the ranks average one bucket where it lies; a rank alone has nothing to average.
    found = [
        dims
        for name, dims in own_events(done, tmp_path)
        if name in ("mpidist:average", "mpidist:all_reduce")
    ]
    agree(world, world.size == 1 or [[40]] in found, f"ours: {found}")


def calls(group):
    """Call all collectives that torch counts; return (name, values) to compare between backends."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    t = torch.arange(2.0 * size) + rank
    many = [torch.zeros(2 * size) for _ in range(size)]
    one, whole = torch.zeros(2), torch.zeros(2 * size * size)
    dist.all_reduce(t, group=group)
    dist.all_reduce(t, dist.ReduceOp.MAX, group=group, async_op=True).wait()
    dist.broadcast(t, 0, group=group)
    dist.reduce(t, 0, group=group)
    dist.broadcast(t, 0, group=group)
    dist.all_gather(many, t, group=group)
    dist.all_gather_into_tensor(whole, t, group=group)
    dist.reduce_scatter(t, many, group=group)
    dist.reduce_scatter_tensor(one, t, group=group)
    dist.all_to_all_single(t, t.clone(), group=group)
    dist.gather(t, many if rank == 0 else None, 0, group=group)
    dist.scatter(t, many if rank == 0 else None, 0, group=group)
    dist.all_reduce_coalesced([t, one], group=group)
    dist.barrier(group=group)
    dist.broadcast_object_list([rank], 0, group=group)
    with dist._coalescing_manager(group=group):
        dist.all_reduce(t, group=group)
        dist.all_reduce(one, group=group)
    sums = (
        functional.all_reduce(t, "sum", group) + functional.all_gather_tensor(one, 0, group).sum()
    )
    if size > 1:
        works = [
            dist.isend(one, (rank + 1) % size, group=group),
            dist.irecv(torch.zeros(2), (rank - 1) % size, group=group),
        ]
        for work in works:
            work.wait()
    return [x.tolist() for x in (t, one, whole, sums)]


def counted(work, group):
    """Return CommDebugMode's counts for ``work(group)``, and the result of ``work``."""
    with CommDebugMode() as mode:
        result = work(group)
    return (
        {str(name): count for name, count in mode.get_comm_counts().items()},
        mode.get_total_counts(),
        result,
    )


def torch_ddp(group):
    pass_through(torch.nn.parallel.DistributedDataParallel(model(), process_group=group))


def fsdp(group):
    mesh, module = DeviceMesh.from_group(group, "cpu"), model()
    fully_shard(module[0], mesh=mesh)
    fully_shard(module, mesh=mesh)
    pass_through(module)


def dtensor(group):
    mesh = DeviceMesh.from_group(group, "cpu")
    sharded = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)])
    return sharded.redistribute(mesh, [Replicate()]).to_local().sum().item()


@pytest.mark.parametrize("work", [calls, torch_ddp, fsdp, dtensor])
def test_comm_debug_mode_counts_as_on_gloo(world, groups, work):
    ours, gloo = (counted(work, group) for group in groups)
    agree(world, ours == gloo, f"{work.__name__}: ours {ours}, Gloo's {gloo}")
    agree(
        world, ours[1] > 0 or (world.size == 1 and work in (fsdp, dtensor)), "nothing was counted"
    )


def test_errors_under_a_mode(world, groups):
    with CommDebugMode() as mode:
        refused = lambda: dist.all_gather([torch.ones(2)] * world.size, torch.ones(3))  # noqa: E731
        raises_on_all(world, ValueError, refused, "all_gather needs")
        t = torch.ones(2)
        dist.all_reduce(t)
    agree(world, mode.get_total_counts() == 1 and t.tolist() == [world.size] * 2, str((mode, t)))


def fake(group):
    size = dist.get_world_size(group)
    with FakeTensorMode():
        t = torch.ones(3)
        works = [
            dist.all_reduce(t, group=group, async_op=True),
            dist.broadcast(t, 0, group=group, async_op=True),
        ]
        whole = torch.empty(3 * size)
        dist.all_gather_into_tensor(whole, t, group=group)
        return [type(work).__name__ for work in works], tuple(whole.shape), type(t).__name__


def traced(group):
    def step(t):
        dist.all_reduce(t, group=group)
        return t + 1

    return make_fx(step)(torch.ones(3)).code


def tracked(group):
    module, tracker = (
        torch.nn.parallel.DistributedDataParallel(model(), process_group=group),
        MemTracker(),
    )
    tracker.track_external(module)
    with tracker:
        pass_through(module)
    return str(tracker.get_tracker_snapshot("peak"))


def flops(group):
    t = torch.ones(4, 4)
    with FlopCounterMode(display=False) as counter, CommDebugMode() as mode:
        dist.all_reduce(t @ t, group=group)
    return counter.get_total_flops(), mode.get_total_counts()


def stacked(group):
    with FakeTensorMode(), CommDebugMode() as mode:
        dist.all_reduce(torch.ones(2), group=group)
    return mode.get_total_counts()


@pytest.mark.parametrize("work", [fake, traced, tracked, flops, stacked])
def test_other_modes_see_what_they_see_on_gloo(world, groups, work):
    seen = []
    for group in groups:
        try:
            seen.append(work(group))
        # torch before 2.13 has no kernel of fake tensors for some operators: neither have we
        except Exception as error:
            seen.append(type(error).__name__)
    agree(world, seen[0] == seen[1], f"ours {seen[0]}, Gloo's {seen[1]}")
    dist.all_reduce(t := torch.ones(2))
    agree(world, t.tolist() == [world.size] * 2, "the group is of use afterwards")
