"""torch.distributed.checkpoint over mpidist's backend: saving and loading."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.integration.training import STEPS, assert_trained, net, reference, sgd, train
from tests.tools.support import agree

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.usefixtures("default_group")]


@pytest.fixture
def folder(world, tmp_path):
    """Rank 0's folder, on all ranks."""
    return world.broadcast_object(str(tmp_path), 0)


def sharded():
    return fully_shard(net(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def test_training_goes_on_where_it_was_saved(world, folder):
    model = sharded()
    update = sgd(model.parameters())
    train(world, model, update, range(STEPS // 2))
    weights, state = get_state_dict(model, update)
    dcp.save({"weights": weights, "state": state}, checkpoint_id=folder)

    fresh = sharded()
    with torch.no_grad():
        for weight in fresh.parameters():
            weight.zero_()
    again = sgd(fresh.parameters())
    weights, state = get_state_dict(fresh, again)
    dcp.load({"weights": weights, "state": state}, checkpoint_id=folder)
    set_state_dict(fresh, again, model_state_dict=weights, optim_state_dict=state)
    train(world, fresh, again, range(STEPS // 2, STEPS))
    assert_trained(
        world, [weight.full_tensor() for weight in fresh.parameters()], reference(world.size)
    )


def test_sharded_is_loaded_whole(world, folder):
    dcp.save({"weights": sharded().state_dict()}, checkpoint_id=folder)
    plain = {name: torch.zeros_like(weight) for name, weight in net().state_dict().items()}
    dcp.load({"weights": plain}, checkpoint_id=folder)
    ok = all(torch.equal(weight, net().state_dict()[name]) for name, weight in plain.items())
    agree(world, ok, "loaded weights differ")


def test_saved_in_the_background(world, folder):
    model = sharded()
    # The saving thread communicates during training, and therefore needs a separate group with a
    # separate order.
    own = dist.new_group()
    pending = dcp.async_save(
        {"weights": model.state_dict()}, checkpoint_id=folder, process_group=own
    )
    # Training continues meanwhile and must not change the saved values.
    train(world, model, sgd(model.parameters()), range(2))
    pending.result(timeout=60)
    dist.destroy_process_group(own)
    world.barrier()
    plain = {name: torch.zeros_like(weight) for name, weight in net().state_dict().items()}
    dcp.load({"weights": plain}, checkpoint_id=folder)
    ok = all(torch.equal(weight, net().state_dict()[name]) for name, weight in plain.items())
    agree(world, ok, "the checkpoint is not that of the call")
