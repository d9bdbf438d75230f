"""torch's Join with uneven inputs: ranks without data mirror the collectives of the others."""

import pytest
import torch
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.integration.training import adam, assert_trained, loss, net, sgd, share
from tests.tools.support import agree

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.usefixtures("default_group", "device")]

_ROUNDS = 3


def inputs_of(rank):
    return 4 + 3 * rank


def alone(world, optimizer, by_initial_size=False, owner_of=None):
    """One process that averages over the ranks that still have inputs (or over all that began).

    ``owner_of``: rank that steps each parameter; torch's sharded optimizer goes on with the
    gradients of the last step that its rank had inputs for, because DDP writes none on a rank that
    has joined.
    """
    model = net()
    parameters = list(model.parameters())
    update = optimizer(parameters)
    for _ in range(_ROUNDS):
        kept = [None] * len(parameters)
        for step in range(inputs_of(world.size - 1)):
            active = [rank for rank in range(world.size) if step < inputs_of(rank)]
            over = world.size if by_initial_size else len(active)
            update.zero_grad()
            shares = [share(step, rank, world.size) for rank in active]
            (sum(loss(model(x), y) for x, y in shares) / over).backward()
            for place, parameter in enumerate(parameters):
                if owner_of is None or owner_of[place] in active:
                    kept[place] = parameter.grad.clone()
                parameter.grad = kept[place].clone()
            update.step()
    return model


def train(world, joinables, model, update, **options):
    for _ in range(_ROUNDS):
        with Join(joinables, **options):
            for step in range(inputs_of(world.rank)):
                update.zero_grad()
                x, y = share(step, world.rank, world.size)
                loss(model(x), y).backward()
                update.step()


@pytest.mark.parametrize("by_initial_size", [False, True])
def test_ddp(world, by_initial_size):
    model = DistributedDataParallel(net())
    # A joined rank does not step; at the end of the context it receives another rank's weights.
    train(
        world,
        [model],
        model,
        sgd_without_memory(model.parameters()),
        divide_by_initial_world_size=by_initial_size,
    )
    assert_trained(world, model.parameters(), alone(world, sgd_without_memory, by_initial_size))


def test_ddp_own_context(world):
    model = DistributedDataParallel(net())
    update = sgd_without_memory(model.parameters())
    for _ in range(_ROUNDS):
        with model.join(divide_by_initial_world_size=False):
            for step in range(inputs_of(world.rank)):
                update.zero_grad()
                x, y = share(step, world.rank, world.size)
                loss(model(x), y).backward()
                update.step()
    assert_trained(world, model.parameters(), alone(world, sgd_without_memory))


def test_ddp_with_sharded_optimizer(world):
    model = DistributedDataParallel(net())
    update = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
    shards = [
        [p for group in groups for p in group["params"]]
        for groups in update._partition_parameters()
    ]
    owner_of = [
        next(rank for rank, shard in enumerate(shards) if any(p is one for one in shard))
        for p in model.parameters()
    ]
    train(world, [model, update], model, update, divide_by_initial_world_size=False)
    assert_trained(world, model.parameters(), alone(world, adam, owner_of=owner_of))


@pytest.mark.mpi(min_size=2)
def test_early_end_raises_on_all(world):
    model = DistributedDataParallel(net())
    raised = None
    try:
        train(world, [model], model, sgd(model.parameters()), throw_on_early_termination=True)
    except RuntimeError as error:
        raised = error
    agree(world, raised is not None and "exhausted" in str(raised), repr(raised))


def sgd_without_memory(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
