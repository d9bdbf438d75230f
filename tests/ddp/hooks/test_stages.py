"""Hooks of several stages whose callbacks run late on one rank and early on another."""

import random
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)

from mpidist.ddp.hooks import default, stages
from mpidist.ddp.hooks.owners import to_owners
from mpidist.ddp.module import DistributedDataParallel
from mpidist.future import Future, completed
from tests.ddp.nets import same_everywhere
from tests.tools.support import agree, raises_on_all

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("device")]


@pytest.fixture(params=[False, True], ids=["in line", "on the group's thread"])
def in_thread(request, world, monkeypatch):
    monkeypatch.setattr(type(world), "is_single_node", not request.param)
    return request.param


def net():
    torch.manual_seed(0)
    parts = [part for _ in range(4) for part in (torch.nn.Linear(16, 16), torch.nn.Tanh())]
    return torch.nn.Sequential(*parts)


def train(group, ddp, steps, seed=0):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3)
    generator = torch.Generator().manual_seed(1000 * seed + group.rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 16, generator=generator)
        optimizer.zero_grad()
        loss = (ddp(x) - torch.tanh(x.roll(1, 1))).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def plain(group, steps):
    ddp = DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0.001)
    train(group, ddp, steps)
    return ddp.module


def equal(one, other, tolerance=1e-5):
    return all(
        torch.allclose(a, b, atol=tolerance)
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize("future_of", ["ours", "torch's"])
@pytest.mark.usefixtures("default_group", "in_thread")
def test_late_callbacks_of_a_users_hook_keep_one_order(group, future_of):
    """Two collectives, and a third from a callback, attached before or after they have ended."""
    random.seed(group.rank)

    def start(tensor):
        if future_of == "ours":
            return group.all_reduce(tensor, "avg", async_op=True).get_future()
        work = dist.all_reduce(tensor.div_(group.size), async_op=True)
        return work.get_future()

    def hook(state, bucket):
        halves = bucket.buffer().clone().chunk(2)
        first, second = [start(half) for half in halves]
        if random.random() < 0.5:
            time.sleep(0.002)
        sums = torch.zeros(3)

        def third(future):
            value = future.value()
            assert value[0].numel() == halves[0].numel()
            sums.fill_(float(bucket.index()))
            start(sums).wait()
            return second.wait()[0]

        def result(future):
            future.value()
            assert bool((sums == bucket.index()).all()), (
                f"bucket {bucket.index()} met another: {sums}"
            )
            return torch.cat(halves)

        return first.then(third).then(result)

    ddp = DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0.001)
    ddp.register_comm_hook(None, hook)
    train(group, ddp, 6)
    agree(group, len(ddp.reducer.layout.plan) > 3)
    agree(group, same_everywhere(group, ddp.module) and equal(ddp.module, plain(group, 6)))


@pytest.mark.usefixtures("default_group", "in_thread")
def test_torchs_powersgd_keeps_ranks_equal(group):
    # torch's batched form never runs: torch 2.13 asserts three dimensions of a matrix with two.
    state = powerSGD_hook.PowerSGDState(None, 4, start_powerSGD_iter=3, min_compression_rate=1)
    ddp = DistributedDataParallel(net(), bucket_cap_mb=0.001)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    losses = train(group, ddp, 30)
    agree(group, same_everywhere(group, ddp.module), "ranks differ")
    agree(
        group, losses[-1] < 0.9 * losses[0] and state.compression_stats()[0] > 1, str(losses[::10])
    )


@pytest.mark.usefixtures("default_group", "in_thread")
def test_torchs_other_hooks_average(group):
    hooks = {
        "allreduce": (None, default_hooks.allreduce_hook, 1e-5),
        "bf16": (None, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook), 3e-2),
        "fp16": (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), 3e-3),
        "per tensor": (dist.group.WORLD, quantization_hooks.quantization_pertensor_hook, 0.1),
        "local SGD": (
            PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=100),
            post_localSGD_hook,
            1e-5,
        ),
    }
    expected = plain(group, 5)
    for name, (state, hook, tolerance) in hooks.items():
        ddp = DistributedDataParallel(net(), bucket_cap_mb=0.001)
        ddp.register_comm_hook(state, hook)
        train(group, ddp, 5)
        agree(
            group,
            same_everywhere(group, ddp.module) and equal(ddp.module, expected, tolerance),
            name,
        )


@pytest.mark.usefixtures("in_thread")
def test_hooks_change_between_steps(group):
    ddp = DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0.001)
    called = []

    def own(state, bucket):
        called.append(state)
        return default.allreduce_hook(group, bucket)

    for step, hook in enumerate([own, default.allreduce_hook, own, None, own]):
        if hook is None:
            ddp.reducer.register_hook(None)
        else:
            ddp.register_comm_hook(step if hook is own else group, hook)
        train(group, ddp, 1, step)
    agree(group, sorted(set(called)) == [0, 2, 4], str(called))
    expected = DistributedDataParallel(net(), process_group=group)
    for step in range(5):
        train(group, expected, 1, step)
    agree(group, same_everywhere(group, ddp.module) and equal(ddp.module, expected.module))


@pytest.mark.usefixtures("in_thread")
def test_a_result_in_other_memory_is_copied_into_the_gradients(group):
    def hook(state, bucket):
        mean = bucket.buffer().clone()
        group.all_reduce(mean, "avg")
        bucket.set_buffer(mean)
        assert all(a.data_ptr() >= mean.data_ptr() for a in bucket.gradients())
        future = Future()
        future.set_result([mean])
        return future

    ddp = DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0.001)
    ddp.register_comm_hook(None, hook)
    train(group, ddp, 3)
    agree(group, equal(ddp.module, plain(group, 3)))


WRONG = {
    "no future": (lambda state, bucket: None, TypeError, "must return a future"),
    "no tensor": (lambda state, bucket: completed("text"), TypeError, "a tensor; got str"),
    "too short": (
        lambda state, bucket: bucket.set_buffer(torch.zeros(1)),
        ValueError,
        "set_buffer needs",
    ),
    "too short a result": (
        lambda state, bucket: completed(bucket.buffer()[:1]),
        ValueError,
        "elements; got shape (1,)",
    ),
    "its own error": (lambda state, bucket: {}["key"], KeyError, "key"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.usefixtures("in_thread")
def test_a_wrong_hook_raises_on_all_and_the_next_step_is_right(group, name):
    hook, error, match = WRONG[name]
    ddp = DistributedDataParallel(net(), process_group=group)
    raises_on_all(group, TypeError, lambda: ddp.register_comm_hook(None, "a name"), "callable")
    ddp.register_comm_hook(None, hook)
    raises_on_all(group, error, lambda: train(group, ddp, 1), match)
    ddp.register_comm_hook(group, default.allreduce_hook)
    train(group, ddp, 2)
    agree(group, same_everywhere(group, ddp.module))


NOT_THE_BUCKET = {
    "too short": lambda bucket: completed(bucket.buffer()[:1]),
    "too long": lambda bucket: completed(torch.zeros(bucket.buffer().numel() + 1)),
    "no future": lambda bucket: None,
    "no tensor": lambda bucket: completed("text"),
    "two tensors": lambda bucket: completed([bucket.buffer()] * 2),
    "without memory": lambda bucket: completed(bucket.buffer().to("meta")),
    "sparse": lambda bucket: completed(bucket.buffer().to_sparse()),
}
AROUND = {
    "alone": lambda hook: hook,
    "in order": lambda hook: stages.in_order(lambda state, bucket: hook(state, bucket)),
    "in bf16": default.bf16_compress_wrapper,
    "to owners": lambda hook: to_owners({}, hook),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.usefixtures("in_thread")
def test_a_wrong_result_on_one_rank_raises_on_all(group, first, around):
    """The hook has reduced: the other ranks are on their way to the end of the pass."""
    last = group.size - 1
    for name, wrong in NOT_THE_BUCKET.items():

        def hook(progress, bucket, wrong=wrong):
            group.all_reduce(bucket.buffer(), "avg")
            is_wrong = progress.step == first and group.rank == last and bucket.index() == 1
            return wrong(bucket) if is_wrong else completed(bucket.buffer())

        progress = SimpleNamespace(step=0)
        ddp = DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0.001)
        ddp.register_comm_hook(progress, AROUND[around](hook))

        def step(ddp=ddp, progress=progress):
            progress.step += 1
            train(group, ddp, 1, seed=progress.step)

        for _ in range(1, first):
            step()
        text = raises_on_all(group, Exception, step, "a communication hook")
        agree(group, group.rank == last or f"rank {last}: " in text, f"{name}: {text}")
        step()
        step()
        agree(group, same_everywhere(group, ddp.module), name)


@pytest.mark.parametrize("value", [torch.ones(2), [torch.ones(2)]], ids=["tensor", "list"])
def test_the_tensor_of_a_future_may_be_in_a_list_as_in_torch(value):
    held = stages.value_of(completed(value), 2)
    assert torch.equal(held, torch.ones(2)) and held.dim() == 1
