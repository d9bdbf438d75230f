"""Backend object of a device, tested through the functions of torch that read it."""

import inspect
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.support import agree

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
        no_memory = not backend.supports_tensor_alloc(torch.device(device))
        backend.eager_connect_single_device(torch.device(device))
        agree(
            world,
            facts == ("mpidist", world.rank, world.size) and not can and no_memory,
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


def test_fsdp_takes_no_memory_of_the_group(world):
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(torch.nn.Linear(4, 4), mesh=dist.init_device_mesh("cpu", (world.size,)))
    allocates = getattr(model, "set_allocate_memory_from_process_group_for_comm", None)
    if allocates is None:
        pytest.skip("this torch's FSDP takes no memory of a group")
    allocates(True)
    model(torch.ones(2, 4)).sum().backward()
    agree(
        world,
        torch.equal(model.bias.grad.full_tensor(), torch.full((4,), 2.0)),
        f"{model.bias.grad}",
    )
