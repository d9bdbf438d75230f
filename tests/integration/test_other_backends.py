"""Groups of another backend beside ours: NCCL's on the GPU, where it admits one rank a device, and gloo's on the host."""

import pytest
import torch
import torch.distributed as dist

from mpidist import ddp as mddp
from tests.integration.training import STEPS, assert_trained, loss, net, reference, sgd, share
from tests.support import agree

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.usefixtures("device")]


@pytest.fixture
def other(device):
    """Name the backend that runs on this device beside ours."""
    name = {"cpu": "gloo", "cuda": "nccl"}[device.type]
    if not dist.is_backend_available(name):
        pytest.skip(f"this torch was built without {name}")
    return name


@pytest.fixture
def destroyed(world):
    """End torch's default group behind the test, with all others that torch knows."""
    yield
    world.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("destroyed")
def test_a_subgroup_of_another_backend(world, other):
    dist.init_process_group("mpidist")
    own = [dist.new_group([rank], backend=other) for rank in range(world.size)][world.rank]
    total = world.size * (world.size + 1) / 2
    wrong = []
    for turn in range(10):
        mine, sums = torch.full((3000,), turn + 1.0), torch.full((5000,), world.rank + 1.0)
        works = [dist.all_reduce(mine, group=own, async_op=True), dist.all_reduce(sums, async_op=True)]
        for work in works[:: 1 if (turn + world.rank) % 2 else -1]:
            work.wait()
        # Each backend continues with what the other has left on the stream.
        sums[:3000] *= mine
        dist.all_reduce(sums, group=own)
        dist.all_reduce(sums)
        expected = torch.full((5000,), total * world.size)
        expected[:3000] *= turn + 1
        if not torch.equal(sums, expected):
            wrong.append((turn, sums[[0, -1]].tolist(), expected[[0, -1]].tolist()))
    agree(world, not wrong, str(wrong[:3]))


@pytest.mark.usefixtures("destroyed")
def test_our_groups_beside_a_default_group_of_another_backend(world, group, other):
    dist.init_process_group(other, store=dist.TCPStore("localhost", 0, 1, True), rank=0, world_size=1)
    ours = mddp.DistributedDataParallel(net(), process_group=group)
    alone = torch.nn.parallel.DistributedDataParallel(net())
    updates = [sgd(model.parameters()) for model in (ours, alone)]
    for step in range(STEPS):
        x, y = share(step, world.rank, world.size)
        for model, update in zip((ours, alone), updates, strict=True):
            update.zero_grad()
            loss(model(x), y).backward()
            update.step()
    assert_trained(world, ours.parameters(), reference(world.size))
    same = [torch.equal(a, b) for a, b in zip(ours.parameters(), alone.parameters(), strict=True)]
    agree(world, world.size == 1 or not any(same), "the other backend's model has the average of all ranks")
