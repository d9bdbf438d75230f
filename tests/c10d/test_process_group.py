"""A group and the Backend registered on it: who reaches which, and what an observer sees."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from mpidist.c10d import generation
from mpidist.errors import GroupError
from tests.tools.support import agree, printed, raises_on_all, short_job

needs_backends = pytest.mark.skipif(
    not generation.HAS_BACKENDS, reason="before torch 2.14 no Python class is a Backend"
)
pytestmark = [needs_backends]

CALLS = (
    "allreduce",
    "broadcast",
    "all_gather_single",
    "reduce_scatter_single",
    "all_to_all_single",
    "barrier",
    "send",
    "recv",
    "recv_anysource",
)


class Operators(TorchDispatchMode):
    """Records the names of c10d's operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def entered(default_group, monkeypatch):
    """Names of the calls that have reached the Backend of the default group."""
    from mpidist.c10d.mpi_backend import MpiBackend

    names = []
    for name in CALLS:
        method = getattr(MpiBackend, name)

        # A method of its own: torch looks for overrides by name.
        def counted(self, *args, _name=name, _method=method):
            names.append(_name)
            return _method(self, *args)

        monkeypatch.setattr(MpiBackend, name, counted)
    return names


@pytest.mark.mpi(min_size=1)
def test_callers_in_cpp_reach_the_backend(world, default_group, entered):
    boxed, x = default_group.boxed(), torch.full((3,), float(world.rank))
    out = torch.empty(3 * world.size)
    torch.ops.c10d._allgather_base_(out, x, boxed, False, -1)
    torch.ops.c10d.broadcast_([x], boxed, world.size - 1, 0, False, -1)
    expected = torch.arange(float(world.size)).repeat_interleave(3)
    agree(world, entered == ["all_gather_single", "broadcast"], f"{entered}")
    agree(world, torch.equal(out, expected) and x.tolist() == [world.size - 1.0] * 3, f"{out} {x}")


@pytest.mark.mpi(min_size=1)
def test_callers_in_python_reach_the_native_group_at_once(world, default_group, entered):
    x = torch.ones(3)
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    dist.barrier()
    agree(world, not entered and x.tolist() == [world.size] * 3, f"{entered} {x}")


@pytest.mark.mpi(min_size=1)
def test_a_mode_sees_every_call_and_the_caller_gets_our_work(world, default_group, entered):
    size, x = world.size, torch.ones(4 * world.size)
    part, rows = torch.empty(4), torch.empty(4 * world.size**2)
    with Operators() as mode:
        dist.all_reduce(x)
        later = dist.all_reduce(x, async_op=True)
        later.wait()
        dist.reduce_scatter_tensor(part, x)
        dist.all_gather_into_tensor(rows, x)
        dist.all_to_all_single(rows[: 4 * size], x)
        dist.barrier()
    names = ["allreduce", "allreduce", "reduce_scatter_single", "all_gather_single"]
    agree(world, entered == [*names, "all_to_all_single", "barrier"], f"{entered}")
    agree(world, len(mode.names) == 6 and mode.names[0] == "allreduce_", f"{mode.names}")
    done = later.is_completed() and later.is_success() and later.exception() is None
    agree(world, done and part.tolist() == [float(size**3)] * 4, f"{part}")


@pytest.mark.mpi(min_size=2)
def test_a_mode_sees_messages_from_any_source(world, default_group, entered):
    x, got = torch.full((2,), 7.0), torch.empty(2)
    with Operators() as mode:
        if world.rank == 0:
            dist.send(x, 1)
        elif world.rank == 1:
            source = dist.recv(got)
            assert source == 0 and got.tolist() == [7, 7]
    seen = {0: ["send"], 1: ["recv_any_source_"]}.get(world.rank, [])
    agree(world, mode.names == seen, f"{mode.names}")


@pytest.mark.mpi(min_size=1)
def test_torchs_reducer_and_functional_collectives_are_seen(world, default_group, entered):
    from torch.distributed import _functional_collectives as functional

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    hooks = []
    default_group.register_pre_hook(17, lambda args: hooks.append(args.name.name))
    try:
        model(torch.full((1, 2), world.rank + 1.0)).sum().backward()
        x = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD).clone()
        dist.broadcast(x, 0)
    finally:
        default_group.unregister_pre_hook(17)
        default_group._is_observed = torch._C._len_torch_dispatch_stack
    mean = sum(range(1, world.size + 1)) / world.size
    gradient = model.module.weight.grad
    agree(world, gradient.tolist() == [[mean] * 2] and x[0] == world.size, f"{gradient} {x}")
    agree(world, entered == ["allreduce", "allreduce", "broadcast"], f"{entered}")
    agree(world, hooks == ["ALLREDUCE", "ALLREDUCE", "BROADCAST"], f"{hooks}")


@pytest.mark.mpi(min_size=1)
def test_a_batch_of_collectives_under_a_mode_is_one_work(world, default_group):
    tensors = [torch.full((2,), float(index)) for index in range(3)]
    with (
        CommDebugMode(),
        dist.distributed_c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as m,
    ):
        for tensor in tensors:
            dist.all_reduce(tensor, async_op=True)
    m.wait()
    dist.all_reduce(tensors[0])
    got = [tensor[0].item() for tensor in tensors]
    agree(world, got == [0, world.size, 2 * world.size], f"{got}")


@pytest.mark.mpi(min_size=1)
def test_calls_after_an_abort_raise_for_callers_in_python_and_cpp(world, default_group):
    group, x = dist.new_group(list(range(world.size))), torch.ones(2)
    group._get_backend(torch.device("cpu")).abort()
    raises_on_all(world, GroupError, lambda: dist.all_reduce(x, group=group), "abort was called")
    boxed = group.boxed()
    call = torch.ops.c10d.broadcast_
    raises_on_all(world, Exception, lambda: call([x], boxed, 0, 0, False, -1), "abort was called")
    dist.destroy_process_group(group)


_NAN_CHECK = """
    import json
    import torch
    import torch.distributed as dist

    dist.init_process_group("mpidist")
    rank = dist.get_rank()
    x = torch.ones(4)
    dist.all_reduce(x)
    found = None
    try:
        dist.all_reduce(torch.full((4,), float("nan")))
    except RuntimeError as error:
        found = str(error)
    print(json.dumps({"rank": rank, "sum": x[0].item(), "found": found}), flush=True)
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchs_nan_check_sees_every_call():
    found = printed(short_job(2, _NAN_CHECK, env={"TORCH_DIST_NAN_CHECK": "1"}))
    assert [one["sum"] for one in found.values()] == [2.0, 2.0]
    assert all(one["found"] and "nan" in one["found"].lower() for one in found.values())
