"""FSDP2 (fully_shard) on a device mesh of mpidist."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.integration.training import assert_trained, net, reference, sgd, train
from tests.support import agree

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.usefixtures("default_group", "device")]


def sharded(mesh, **options):
    model = net()
    for layer in (model.first, model.side, model.last):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def trained(world, model):
    train(world, model, sgd(model.parameters()))
    return [weight.full_tensor() for weight in model.parameters()]


@pytest.mark.parametrize("reshard", [True, False])
def test_fully_shard(world, device, reshard):
    mesh = init_device_mesh(device.type, (world.size,))
    weights = trained(world, sharded(mesh, reshard_after_forward=reshard))
    assert_trained(world, weights, reference(world.size))


@pytest.mark.mpi(min_size=4)
def test_sharded_in_rows_and_replicated_in_columns(world, device):
    if world.size % 2:
        pytest.skip("needs an even number of ranks")
    mesh = init_device_mesh(
        device.type, (2, world.size // 2), mesh_dim_names=("replicate", "shard")
    )
    assert_trained(world, trained(world, sharded(mesh)), reference(world.size))


def test_mixed_precision(world, device):
    mesh = init_device_mesh(device.type, (world.size,))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float64
    )
    weights = trained(world, sharded(mesh, mp_policy=policy))
    assert_trained(world, weights, reference(world.size), 5e-2)


def test_shards_are_small_and_whole(world, device):
    model = sharded(init_device_mesh(device.type, (world.size,)))
    weight = model.first.weight
    rows = world.all_gather_object(weight.to_local().shape[0])
    whole = weight.full_tensor()
    ok = max(rows) <= -(-17 // world.size) and torch.equal(whole, net().first.weight)
    agree(world, sum(rows) == 17 and ok, f"rows {rows}")
