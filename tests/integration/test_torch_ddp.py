"""torch's DistributedDataParallel and its hooks: k ranks x batch b = 1 rank x batch k*b."""

import contextlib
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.integration.training import (
    STEPS,
    assert_trained,
    loss,
    net,
    reference,
    sgd,
    share,
)
from tests.tools.support import agree

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.usefixtures("default_group", "device")]


def train(world, model, branch=None):
    update = sgd(model.parameters())
    for step in range(STEPS):
        update.zero_grad()
        x, y = share(step, world.rank, world.size)
        output = model(x) if branch is None else model(x, branch(step, world.rank))
        loss(output, y).backward()
        update.step()
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"bucket_cap_mb": 1e-4},
        {"broadcast_buffers": False, "init_sync": False},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
def test_options(world, options):
    model = train(world, DistributedDataParallel(net(), **options))
    assert_trained(world, model.parameters(), reference(world.size))


@pytest.mark.parametrize(("kind", "tolerance"), [("ALLREDUCE", 1e-10), ("FP16_COMPRESS", 5e-3)])
def test_built_in_hooks(world, kind, tolerance):
    model = DistributedDataParallel(net())
    model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))
    shown = model._get_ddp_logging_data()["comm_hook"]
    agree(world, shown == f"BuiltinCommHookType.{kind}", shown)
    train(world, model)
    assert_trained(world, model.parameters(), reference(world.size), tolerance)


def test_weights_of_rank_0_reach_all(world):
    model = net()
    with torch.no_grad():
        for weight in model.parameters():
            weight += world.rank
    train(world, DistributedDataParallel(model))
    assert_trained(world, model.parameters(), reference(world.size))


@pytest.mark.parametrize("view", [False, True])
def test_find_unused_parameters(world, view):
    def branch(step, part):
        return (step + part) % 3 == 0

    model = DistributedDataParallel(
        net(), find_unused_parameters=True, gradient_as_bucket_view=view
    )
    train(world, model, branch)
    assert_trained(world, model.parameters(), reference(world.size, branch=branch))


def test_static_graph_with_a_part_that_is_never_used(world):
    def never(step, part):
        return False

    model = train(world, DistributedDataParallel(net(), static_graph=True), never)
    assert_trained(world, model.parameters(), reference(world.size, branch=never))


@pytest.mark.parametrize("view", [False, True])
def test_no_sync_accumulates(world, view):
    model = DistributedDataParallel(net(), gradient_as_bucket_view=view)
    update = sgd(model.parameters())
    for step in range(STEPS):
        update.zero_grad()
        x, y = share(step, world.rank, world.size)
        halves = list(zip(x.chunk(2), y.chunk(2), strict=True))
        for place, (rows, targets) in enumerate(halves):
            with contextlib.nullcontext() if place == len(halves) - 1 else model.no_sync():
                (loss(model(rows), targets) / len(halves)).backward()
        update.step()
    assert_trained(world, model.parameters(), reference(world.size))


def bf16(state, bucket):
    """The hook under another name, because torch refuses its name on all backends but NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


@pytest.mark.parametrize(
    ("hook", "tolerance"),
    [
        (default_hooks.allreduce_hook, 1e-10),
        (default_hooks.fp16_compress_hook, 5e-3),
        (bf16, 5e-2),
        (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), 5e-3),
    ],
    ids=["allreduce", "fp16", "bf16", "fp16_wrapper"],
)
def test_stateless_hooks(world, hook, tolerance):
    model = DistributedDataParallel(net())
    model.register_comm_hook(None, hook)
    train(world, model)
    assert_trained(world, model.parameters(), reference(world.size), tolerance)


def test_powersgd_of_full_rank_is_the_average(world):
    model = DistributedDataParallel(net())
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=64, start_powerSGD_iter=2, min_compression_rate=1e-6
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(world, model)
    assert_trained(world, model.parameters(), reference(world.size), 1e-8)
    assert state.error_dict, "nothing was compressed"


@pytest.fixture
def batched_hook(monkeypatch):
    """torch's batched hook, which fails for one matrix in torch 2.13 on any backend."""
    orthogonalize = powerSGD_hook._orthogonalize

    def of_one_too(matrices, epsilon=0):
        orthogonalize(matrices.unsqueeze(0) if matrices.dim() == 2 else matrices, epsilon)

    monkeypatch.setattr(powerSGD_hook, "_orthogonalize", of_one_too)
    return powerSGD_hook.batched_powerSGD_hook


def test_batched_powersgd_of_full_rank_is_the_average(world, batched_hook):
    model = net()
    side = math.ceil(math.sqrt(sum(weight.numel() for weight in model.parameters())))
    model = DistributedDataParallel(model)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=side, start_powerSGD_iter=2)
    model.register_comm_hook(state, batched_hook)
    train(world, model)
    assert_trained(world, model.parameters(), reference(world.size), 1e-8)
    assert state.error_dict, "nothing was compressed"


@pytest.mark.parametrize("batched", [False, True])
def test_powersgd_of_rank_one_keeps_the_ranks_together(world, batched_hook, batched):
    model = DistributedDataParallel(net())
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    )
    model.register_comm_hook(state, batched_hook if batched else powerSGD_hook.powerSGD_hook)
    train(world, model)
    # Lossy gradients with error feedback: the result is near the reference, not equal.
    assert_trained(world, model.parameters(), reference(world.size), 0.5)
    assert state.error_dict, "nothing was compressed"


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}])
def test_sparse_gradients(world, options):
    """An embedding's gradient uses the sparse all-reduce, the others the dense buckets."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.EmbeddingBag(10, 4, mode="sum", sparse=True), torch.nn.Linear(4, 2)
    ).double()
    alone = torch.nn.Sequential(
        torch.nn.EmbeddingBag(10, 4, mode="sum"), torch.nn.Linear(4, 2)
    ).double()
    alone.load_state_dict(model.state_dict())
    model = DistributedDataParallel(model, **options)
    # Without momentum, because its sparse buffer holds duplicate elements, which a GPU adds to the
    # weights in any order.
    update, its_update = (torch.optim.SGD(some.parameters(), lr=0.1) for some in (model, alone))

    def words(part, step):
        return torch.randint(
            0, 10, (3, 2), generator=torch.Generator().manual_seed(10 * step + part)
        )

    for step in range(STEPS):
        update.zero_grad()
        its_update.zero_grad()
        model(words(world.rank, step)).square().mean().backward()
        assert model.module[0].weight.grad.is_sparse
        update.step()
        for part in range(world.size):
            (alone(words(part, step)).square().mean() / world.size).backward()
        its_update.step()
    assert_trained(world, model.parameters(), alone)
