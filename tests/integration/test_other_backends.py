"""Groups of other backends in addition to mpidist's: NCCL on GPUs, Gloo on the CPU."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from mpidist import ddp as mddp
from mpidist import rpc
from mpidist.optim import OSS
from tests.integration.training import STEPS, assert_trained, loss, net, reference, sgd, share
from tests.tools.support import agree

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.usefixtures("device")]


@pytest.fixture
def other(device):
    """Name the other backend for this device."""
    name = {"cpu": "gloo", "cuda": "nccl"}[device.type]
    if not dist.is_backend_available(name):
        pytest.skip(f"this torch was built without {name}")
    return name


@pytest.fixture
def destroyed(world):
    """Destroy torch's default group and all other groups after the test."""
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
        works = [
            dist.all_reduce(mine, group=own, async_op=True),
            dist.all_reduce(sums, async_op=True),
        ]
        for work in works[:: 1 if (turn + world.rank) % 2 else -1]:
            work.wait()
        # Each backend continues with the other backend's results on the stream.
        sums[:3000] *= mine
        dist.all_reduce(sums, group=own)
        dist.all_reduce(sums)
        expected = torch.full((5000,), total * world.size)
        expected[:3000] *= turn + 1
        if not torch.equal(sums, expected):
            wrong.append((turn, sums[[0, -1]].tolist(), expected[[0, -1]].tolist()))
    agree(world, not wrong, str(wrong[:3]))


@pytest.mark.usefixtures("destroyed")
def test_our_groups_with_a_default_group_of_another_backend(world, group, other):
    dist.init_process_group(
        other, store=dist.TCPStore("localhost", 0, 1, True), rank=0, world_size=1
    )
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
    agree(
        world,
        world.size == 1 or not any(same),
        "the other backend's model has the average of all ranks",
    )


@pytest.fixture
def shared(world, other, device, destroyed):
    """A mixed group: the other backend for the test's device; one rank if GPUs are too few."""
    listed = "cpu:gloo,cuda:mpidist" if device.type == "cpu" else "cuda:nccl,cpu:mpidist"
    if device.type == "cpu":
        dist.init_process_group(listed, init_method="mpi://")
        yield dist.group.WORLD
    elif torch.cuda.device_count() >= world.size:
        with torch.cuda.device(world.rank):
            dist.init_process_group(listed, init_method="mpi://")
            yield dist.group.WORLD
    else:
        dist.init_process_group("mpidist")
        yield [dist.new_group([rank], backend=listed) for rank in range(world.size)][world.rank]


def test_a_group_shared_by_device(world, shared, device, other, tmp_path):
    place = (
        torch.device(device.type, torch.cuda.current_device()) if device.type == "cuda" else device
    )
    rank, size = shared.rank(), shared.size()
    taken = shared._get_backend(place)
    agree(world, taken.name() == other, f"{taken.name()} has the {place}")
    # The other backend sends gradients, MPI the optimizer's shards.
    model = torch.nn.parallel.DistributedDataParallel(net().to(place), process_group=shared)
    update = OSS(model.parameters(), torch.optim.SGD, group=shared, lr=0.1, momentum=0.9)
    for step in range(STEPS):
        x, y = share(step, rank, size)
        update.zero_grad()
        loss(model(x.to(place)), y.to(place)).backward()
        update.step()
    assert_trained(shared.native, model.parameters(), reference(size).to(place))
    # One call of each kind: a batch of messages, a barrier, objects, a checkpoint.
    right, left = (rank + 1) % size, (rank - 1) % size
    sent, got = torch.full((3,), float(rank), device=place), torch.empty(3, device=place)
    if size > 1:
        ops = [
            dist.P2POp(dist.isend, sent, right, shared),
            dist.P2POp(dist.irecv, got, left, shared),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        agree(world, bool((got == left).all()), f"got {got} from {left}")
    dist.barrier(group=shared, device_ids=[place.index] if device.type == "cuda" else None)
    gathered = [None] * size
    dist.all_gather_object(gathered, rank, group=shared)
    folder = shared.native.broadcast_object(str(tmp_path), 0)
    state = {"weights": model.module.state_dict()}
    dcp.save(state, checkpoint_id=folder, process_group=shared)
    kept = {name: weight.clone() for name, weight in state["weights"].items()}
    for weight in state["weights"].values():
        weight.zero_()
    dcp.load(state, checkpoint_id=folder, process_group=shared)
    same = all(torch.equal(weight, kept[name]) for name, weight in state["weights"].items())
    agree(world, same and gathered == list(range(size)), f"{gathered}")


@pytest.mark.usefixtures("shared")
def test_rpc_and_subgroups_with_a_group_shared_by_device(world, other):
    rpc.init_rpc(f"worker{world.rank}")
    sums = rpc.rpc_sync(
        f"worker{(world.rank + 1) % world.size}",
        torch.add,
        (torch.ones(2, device="cpu"), world.rank),
    )
    rpc.shutdown()
    agree(world, sums.tolist() == [1 + world.rank] * 2, str(sums))
    for backend in (None, "mpidist", other):
        own = [dist.new_group([rank], backend=backend) for rank in range(world.size)][world.rank]
        alone = torch.full((2,), 3.0)
        dist.all_reduce(alone, group=own)
        agree(world, alone.tolist() == [3, 3], f"{backend}: {alone}")
