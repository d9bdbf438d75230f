"""torch's post-local SGD and model averagers on the backend, against a twin that reckons alone."""

from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.distributed.optim import PostLocalSGDOptimizer

from mpidist.ddp.module import DistributedDataParallel
from tests.tools.support import agree

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("default_group", "device")]

MODULES = [DistributedDataParallel, torch.nn.parallel.DistributedDataParallel]
WARMUP, PERIOD, STEPS = 2, 3, 9


def pairs(size):
    return [list(range(size))[start : start + 2] for start in range(0, size, 2)]


def input_of(rank, step):
    return torch.arange(4.0) * (rank + 1) + step


def gradient_of(rank, size, step, locally):
    """Return the average of the inputs: over all, then over the rank's pair or over itself."""
    members = range(size)
    if step >= WARMUP:
        members = pairs(size)[rank // 2] if locally else [rank]
    return sum(input_of(other, step) for other in members) / len(members)


def is_due(step):
    return step >= WARMUP and (step - WARMUP) % PERIOD == 0


def twin(size, locally):
    """Return gradient and weight of each rank after each step of SGD with momentum."""
    weights, speeds = torch.zeros(size, 4), torch.zeros(size, 4)
    found = []
    for step in range(STEPS):
        gradients = torch.stack([gradient_of(rank, size, step, locally) for rank in range(size)])
        speeds = 0.5 * speeds + gradients if step else gradients
        weights = weights - 0.125 * speeds
        if is_due(step):
            weights = weights.mean(0).expand(size, 4)
        found.append((gradients, weights))
    return found


@pytest.mark.parametrize("module_of", MODULES, ids=["ours", "torch's"])
def test_post_local_sgd_has_the_expected_gradients_and_weights(world, module_of):
    subgroup, _ = dist.new_subgroups_by_enumeration(pairs(world.size))
    for locally in (True, False):
        model = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        ddp = module_of(model)
        state = PostLocalSGDState(None, subgroup, WARMUP, locally)
        ddp.register_comm_hook(state, post_localSGD_hook)
        optimizer = PostLocalSGDOptimizer(
            torch.optim.SGD(ddp.parameters(), lr=0.125, momentum=0.5),
            PeriodicModelAverager(period=PERIOD, warmup_steps=WARMUP),
        )
        for step, (gradients, weights) in enumerate(twin(world.size, locally)):
            optimizer.zero_grad()
            ddp(input_of(world.rank, step)).sum().backward()
            own = model.weight.grad[0]
            agree(
                world,
                torch.allclose(own, gradients[world.rank]),
                f"step {step}: gradient {own} and not {gradients[world.rank]}",
            )
            optimizer.step()
            own = model.weight.detach()[0]
            agree(
                world,
                torch.allclose(own, weights[world.rank]),
                f"step {step}: weight {own} and not {weights[world.rank]}",
            )
        agree(world, state.iter == WARMUP and optimizer.state_dict()["step"] == STEPS)


def averaged(averager, rank):
    """Return what a call of the averager makes of a parameter that holds the rank."""
    weight = torch.nn.Parameter(torch.full((3,), float(rank)))
    weight.grad = torch.zeros(3)
    unused = torch.nn.Parameter(torch.full((2,), float(rank)))
    averager.average_parameters([{"params": [weight, unused]}])
    assert bool((unused == rank).all())  # a parameter without a gradient stays
    return float(weight[0].detach())


def test_the_averager_of_a_loaded_optimizer_goes_on(world):
    def optimizer(period, warmup):
        local = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        return PostLocalSGDOptimizer(local, PeriodicModelAverager(period, warmup))

    for period, warmup in [(2, 0), (4, 3), (3, 5)]:
        first, resumed = optimizer(period, warmup), optimizer(period, warmup)
        for _ in range(7):
            averaged(first.averager, world.rank)
        resumed.load_state_dict(first.state_dict())
        for step in range(7, 14):
            due = step >= warmup and (step - warmup) % period == 0
            want = (world.size - 1) / 2 if due else world.rank
            found = [averaged(one.averager, world.rank) for one in (first, resumed)]
            agree(world, found == [want, want], f"step {step}: {found} and not {want}")


def test_levels_of_the_hierarchical_averager(world):
    size = world.size
    levels = OrderedDict({2: 1, 4: 2, 8: size} if size % 2 == 0 else {2: 1, 6: size})
    averager = HierarchicalModelAverager(levels, 2)
    for step in range(17):
        sizes = [group for period, group in levels.items() if step >= 2 and step % period == 0]
        among = sizes[-1] if sizes else 1
        first = world.rank // among * among
        want = sum(range(first, first + among)) / among
        found = averaged(averager, world.rank)
        agree(world, found == want, f"step {step}: {found} and not {want}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_averages_keep_shapes_and_dtypes(world, dtype):
    torch.manual_seed(0)
    forms = [
        torch.randn(3, 4),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(4, 6).t(),
        torch.zeros(0, 2),
    ]
    held = [torch.nn.Parameter((form + world.rank).to(dtype)) for form in forms]
    average_parameters(iter(held), dist.group.WORLD)
    tolerance = 5e-2 if dtype is torch.bfloat16 else 1e-6
    for parameter, form in zip(held, forms, strict=True):
        want = form.double() + (world.size - 1) / 2
        agree(
            world,
            parameter.dtype is dtype
            and torch.allclose(parameter.detach().double(), want, atol=tolerance),
            f"{tuple(form.shape)}",
        )
