"""torch's ZeroRedundancyOptimizer with DDP: the same weights as Adam in one process."""

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.integration.training import (
    STEPS,
    adam,
    assert_trained,
    loss,
    net,
    reference,
    share,
    train,
)
from tests.tools.support import agree

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.usefixtures("default_group", "device")]


@pytest.mark.parametrize("as_view", [False, True])
def test_equals_adam(world, as_view):
    model = DistributedDataParallel(net())
    update = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, parameters_as_bucket_view=as_view, lr=1e-2
    )
    train(world, model, update)
    assert_trained(world, model.parameters(), reference(world.size, adam))


def test_consolidated_state_is_adams(world):
    model = DistributedDataParallel(net())
    update = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
    train(world, model, update)
    to = world.size - 1
    update.consolidate_state_dict(to=to)
    ok, text = True, ""
    if world.rank == to:
        one = net()
        plain = adam(one.parameters())
        train_alone(one, plain, world.size)
        theirs, ours = plain.state_dict()["state"], update.state_dict()["state"]
        text = f"{sorted(theirs)} and {sorted(ours)}"
        ok = theirs.keys() == ours.keys() and all(
            torch.allclose(theirs[i][name].cpu(), ours[i][name].cpu(), rtol=0, atol=1e-12)
            for i in theirs
            for name in ("exp_avg", "exp_avg_sq", "step")
        )
    agree(world, ok, text)


def train_alone(model, update, parts):
    for step in range(STEPS):
        update.zero_grad()
        shares = [share(step, part, parts) for part in range(parts)]
        (sum(loss(model(x), y) for x, y in shares) / parts).backward()
        update.step()
