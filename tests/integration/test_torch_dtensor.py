"""DTensor on a device mesh of mpidist: redistribution and products, against one process."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from tests.tools.support import agree

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.usefixtures("default_group", "device")]


def matrix(rows, columns, seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, (rows, columns), generator=source).double()


@pytest.mark.parametrize("source", [Replicate(), Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("target", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_redistribute(world, device, source, target):
    mesh = init_device_mesh(device.type, (world.size,))
    whole = matrix(7, 5)  # divided evenly by no number of ranks in 2, 3, 4
    moved = distribute_tensor(whole, mesh, [source]).redistribute(placements=[target])
    agree(
        world, moved.placements == (target,) and torch.equal(moved.full_tensor(), whole), f"{moved}"
    )


def test_partial_sums_become_whole(world, device):
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh(device.type, (world.size,))
    mine = matrix(4, 3) * (world.rank + 1)
    expected = matrix(4, 3) * sum(range(1, world.size + 1))
    partial = DTensor.from_local(mine, mesh, [Partial()])
    for target in (Replicate(), Shard(0)):
        agree(
            world,
            torch.equal(partial.redistribute(placements=[target]).full_tensor(), expected),
            str(target),
        )


@pytest.mark.parametrize("left", [Replicate(), Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("right", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_matmul(world, device, left, right):
    mesh = init_device_mesh(device.type, (world.size,))
    a, b = matrix(6, 7), matrix(7, 4, seed=1)
    product = distribute_tensor(a, mesh, [left]) @ distribute_tensor(b, mesh, [right])
    agree(world, torch.equal(product.full_tensor(), a @ b), f"{product}")


def test_gradients_flow_through_a_sharded_product(world, device):
    mesh = init_device_mesh(device.type, (world.size,))
    a, b = matrix(6, 7).requires_grad_(), matrix(7, 4, seed=1).requires_grad_()
    (a @ b).sum().backward()
    there = [distribute_tensor(t.detach(), mesh, [Shard(0)]).requires_grad_() for t in (a, b)]
    (there[0] @ there[1]).sum().backward()
    ok = all(torch.equal(t.grad.full_tensor(), w.grad) for t, w in zip(there, (a, b), strict=True))
    agree(world, ok, "gradients differ")


@pytest.mark.mpi(min_size=4)
def test_two_dimensions(world, device):
    if world.size % 2:
        pytest.skip("needs an even number of ranks")
    mesh = init_device_mesh(device.type, (2, world.size // 2), mesh_dim_names=("rows", "columns"))
    a, b = matrix(6, 7), matrix(7, 4, seed=1)
    for left in ([Shard(0), Shard(1)], [Shard(1), Shard(0)], [Replicate(), Shard(0)]):
        there = distribute_tensor(a, mesh, left)
        product = there @ distribute_tensor(b, mesh, [Shard(0), Shard(1)])
        moved = there.redistribute(placements=[Shard(1), Replicate()])
        ok = torch.equal(product.full_tensor(), a @ b) and torch.equal(moved.full_tensor(), a)
        agree(world, ok, str(left))
    rows = mesh["rows"].get_group()
    agree(
        world,
        rows.size() == 2 and mesh["columns"].size() == world.size // 2,
        "sub-meshes have wrong sizes",
    )
