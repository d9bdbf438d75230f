"""FSDP2 (fully_shard) on a device mesh of mpidist."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mpidist.comm.algorithms import node_memory
from tests.integration.training import STEPS, assert_trained, net, reference, sgd, train
from tests.tools.support import agree

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


@pytest.mark.parametrize("device", [torch.device("cpu")], ids=["cpu"])
@pytest.mark.parametrize("reshard", [True, False])
def test_memory_of_the_group_gives_the_same_bits(
    world, default_group, device, monkeypatch, reshard
):
    """All staging memory is node memory, and every all-gather reads there."""
    monkeypatch.setattr(node_memory, "SMALLEST_BYTES", 1)
    native, read = default_group.native, []
    # Calls prepared for the former limit, in memory that only some ranks get again.
    native._fast_path.forget()
    true_gather = node_memory.NodeMemory.all_gather

    def spy(*args):
        read.append(true_gather(*args))
        return read[-1]

    monkeypatch.setattr(node_memory.NodeMemory, "all_gather", spy)
    mesh = init_device_mesh(device.type, (world.size,))
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        weights = []
        for allocates in (False, True):
            model = sharded(mesh, reshard_after_forward=reshard, mp_policy=policy)
            if not hasattr(model, "set_allocate_memory_from_process_group_for_comm"):
                pytest.skip("this torch's FSDP takes no memory of a group")
            for module in (model.first, model.side, model.last):
                module.set_allocate_memory_from_process_group_for_comm(allocates)
            train(world, model, sgd(model.parameters()))
            gathers = read.count(True)
            weights.append([weight.full_tensor() for weight in model.parameters()])
            read.clear()
            wanted = 3 * STEPS * (1 + reshard) if allocates and native.allocates_node_memory else 0
            agree(world, gathers == wanted, f"{gathers} gathers in node memory, not {wanted}")
        same = all(torch.equal(plain, other) for plain, other in zip(*weights, strict=True))
        agree(world, same, f"{policy}")


def test_shards_are_small_and_whole(world, device):
    model = sharded(init_device_mesh(device.type, (world.size,)))
    weight = model.first.weight
    rows = world.all_gather_object(weight.to_local().shape[0])
    whole = weight.full_tensor()
    ok = max(rows) <= -(-17 // world.size) and torch.equal(whole, net().first.weight)
    agree(world, sum(rows) == 17 and ok, f"rows {rows}")
