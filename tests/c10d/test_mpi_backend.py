"""Backend object of a device, tested through the functions of torch that read it."""

import inspect
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mpidist.comm.algorithms import node_memory
from tests.tools.support import agree

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.usefixtures("default_group")]


def test_the_backend_of_either_device_describes_the_group(world, default_group):
    for device in ("cpu", "cuda"):
        backend = default_group._get_backend(torch.device(device))
        facts = backend.name(), backend.rank(), backend.size()
        can = (
            backend.supports_coalescing
            or backend.supports_time_estimate
            or not backend.supports_shrinking
        )
        has_memory = device == "cpu" and default_group.native.allocates_node_memory
        is_memory_known = backend.supports_tensor_alloc(torch.device(device)) is has_memory
        backend.eager_connect_single_device(torch.device(device))
        agree(
            world,
            facts == ("mpidist", world.rank, world.size) and not can and is_memory_known,
            f"{device}: {facts}",
        )
    with pytest.raises(RuntimeError, match="meta"):
        default_group._get_backend(torch.device("meta"))


def test_functions_of_torch_that_read_the_backend_work_or_refuse(world, default_group):
    with (
        pytest.raises(NotImplementedError, match="time estimator is not supported"),
        distributed_c10d._time_estimator(),
    ):
        pass
    assert distributed_c10d._get_process_group_uid(default_group) == -1
    distributed_c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=5))
    of_a_device = dist.new_group(list(range(world.size)), device_id=torch.device("cuda", 0))
    assert of_a_device._get_backend(torch.device("cuda", 0)).name() == "mpidist"
    x = torch.ones(2)
    dist.all_reduce(x, group=of_a_device)
    dist.destroy_process_group(of_a_device)
    agree(world, x.tolist() == [world.size] * 2, f"{x}")


def test_a_default_group_with_a_device_is_nothing_that_nccl_could_split(world, default_group):
    before = default_group.bound_device_id
    default_group.bound_device_id = torch.device("cuda", 0)
    try:
        # torch 2.15 asks for the backend of the new group, too.
        takes = len(inspect.signature(distributed_c10d._get_split_source).parameters)
        source = distributed_c10d._get_split_source(*(default_group, "mpidist")[:takes])
        some = dist.new_group([0])
    finally:
        default_group.bound_device_id = before
    can_split = default_group._get_backend(torch.device("cuda", 0)).supports_splitting
    agree(
        world,
        source is None
        and can_split
        and (some == dist.GroupMember.NON_GROUP_MEMBER) == (world.rank > 0),
    )


def test_memory_is_allocated_by_group_and_backend(world, default_group):
    """By the names that FSDP2 calls."""
    native = default_group.native
    for owner in (default_group, default_group._get_backend(torch.device("cpu"))):
        allocated = owner.allocate_tensor(1000, dtype=torch.bfloat16, device=torch.device("cpu"))
        made = node_memory.of(native._comm)
        is_shared = made is not None and made.offset(allocated) >= 0
        facts = allocated.shape, allocated.dtype, owner.supports_tensor_alloc(allocated.device)
        wanted = (1000,), torch.bfloat16, native.allocates_node_memory
        agree(world, facts == wanted and is_shared is native.allocates_node_memory, f"{facts}")
        with pytest.raises(ValueError, match="on the CPU alone; got cuda"):
            owner.allocate_tensor(1, dtype=torch.float32, device=torch.device("cuda"))
