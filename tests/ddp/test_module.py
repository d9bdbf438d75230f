"""k ranks × batch b train as one rank × batch k·b does, under every combination of options; and what cannot work says why."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mpidist.ddp.module import DistributedDataParallel
from mpidist.errors import DisagreementError
from tests.support import agree, raises_on_all

pytestmark = pytest.mark.mpi
BATCH = 4


class Net(torch.nn.Module):
    """Shared, frozen, double and batch-dependent parameters; ``branch`` chooses which are used."""

    def __init__(self, checkpointing=None, with_unused=False):
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(6, 16)
        self.shared = torch.nn.Linear(16, 16)
        self.frozen = torch.nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.conv = torch.nn.Conv2d(1, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.wide = torch.nn.Linear(32, 3).double()
        self.extra = torch.nn.Linear(6, 3).double() if with_unused else None
        self.register_buffer("seen", torch.zeros(1))
        self.checkpointing = checkpointing

    def body(self, x):
        return torch.tanh(self.shared(torch.tanh(self.shared(x))))

    def forward(self, x, with_extra=False):
        h = torch.tanh(self.first(x))
        h = h + torch.tanh(self.frozen(h))
        h = self.body(h) if self.checkpointing is None else checkpoint(self.body, h, use_reentrant=self.checkpointing)
        image = self.conv(h.view(-1, 1, 4, 4))
        y = self.wide(image.flatten(1).double())
        if with_extra:
            y = y + self.extra(x.double())
        return {"y": y, "h": h}


def data(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(BATCH, 6, generator=generator), torch.randn(BATCH, 3, generator=generator).double()


def loss_of(output, target):
    return (output["y"] - target).square().mean() + output["h"].mean()


def reference(size, steps, extra_ranks=(), **options):
    net = Net(**options)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(size):
            x, target = data(rank, step)
            (loss_of(net(x, rank in extra_ranks), target) / size).backward()
        optimizer.step()
    return net


def train(group, ddp, steps, set_to_none, extra_ranks=()):
    optimizer = torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], lr=0.1)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        x, target = data(group.rank, step)
        loss_of(ddp(x, group.rank in extra_ranks), target).backward()
        optimizer.step()
    return ddp.module


def same_everywhere(group, net):
    flat = torch.cat([p.detach().double().flatten() for p in net.parameters()])
    all_flat = torch.empty(group.size * flat.numel(), dtype=flat.dtype)
    group.all_gather_into_tensor(all_flat, flat)
    return all(torch.equal(row, flat) for row in all_flat.view(group.size, -1))


def close(net, expected):
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(net.parameters(), expected.parameters(), strict=True))


OPTIONS = list(itertools.product([True, False], [False, True], [False, True], [None, 0.0005], [None, False], [True, False]))


@pytest.mark.parametrize(("view", "find", "static", "cap", "checkpointing", "set_to_none"), OPTIONS)
def test_every_combination_of_options(group, view, find, static, cap, checkpointing, set_to_none):
    ddp = DistributedDataParallel(
        Net(checkpointing),
        process_group=group,
        gradient_as_bucket_view=view,
        find_unused_parameters=find,
        static_graph=static,
        bucket_cap_mb=cap,
    )
    net = train(group, ddp, 5, set_to_none)
    expected = reference(group.size, 5, checkpointing=checkpointing)
    agree(group, same_everywhere(group, net), "ranks differ")
    agree(group, close(net, expected), "differs from one process")


@pytest.mark.parametrize("view", [True, False])
def test_reentrant_checkpoints(group, view):
    ddp = DistributedDataParallel(Net(True), process_group=group, gradient_as_bucket_view=view, bucket_cap_mb=0.0005)
    net = train(group, ddp, 5, True)
    agree(group, same_everywhere(group, net) and close(net, reference(group.size, 5, checkpointing=True)))


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("who", ["nobody", "rank 0", "everybody"])
def test_unused_parameters(group, view, who):
    ranks = {"nobody": (), "rank 0": (0,), "everybody": tuple(range(group.size))}[who]
    ddp = DistributedDataParallel(
        Net(with_unused=True), process_group=group, gradient_as_bucket_view=view, find_unused_parameters=True
    )
    net = train(group, ddp, 4, True, ranks)
    expected = reference(group.size, 4, ranks, with_unused=True)
    agree(group, same_everywhere(group, net) and close(net, expected))
    agree(group, (net.extra.weight.grad is None) == (not ranks))


def test_an_unused_parameter_is_named_with_its_ranks(group):
    ddp = DistributedDataParallel(Net(with_unused=True), process_group=group, bucket_cap_mb=0.0005)
    ranks = tuple(range(group.size - 1))  # the last lacks it

    def step():
        x, target = data(group.rank, 0)
        loss_of(ddp(x, group.rank in ranks), target).backward()

    text = raises_on_all(group, RuntimeError, step, "received no gradient")
    agree(group, f"rank {group.size - 1}: extra.weight, extra.bias" in text and "find_unused_parameters=True" in text, text)


def test_autograd_grad_is_refused_with_the_reason(group):
    ddp = DistributedDataParallel(Net(), process_group=group)

    def call():
        x, target = data(group.rank, 0)
        torch.autograd.grad(loss_of(ddp(x), target), [ddp.module.first.weight])

    raises_on_all(group, RuntimeError, call, "torch.autograd.grad() is not supported")


@pytest.mark.parametrize("view", [True, False])
def test_no_sync_adds_up_and_the_next_pass_averages(group, view):
    ddp = DistributedDataParallel(Net(), process_group=group, gradient_as_bucket_view=view, bucket_cap_mb=0.0005)
    expected = Net()
    for step in range(0, 6, 3):
        for part in range(3):
            x, target = data(group.rank, step + part)
            if part < 2:
                with ddp.no_sync():
                    loss_of(ddp(x), target).backward()
            else:
                loss_of(ddp(x), target).backward()
            for rank in range(group.size):
                x, target = data(rank, step + part)
                (loss_of(expected(x), target) / group.size).backward()
        pairs = [(p.grad, q.grad) for p, q in zip(ddp.module.parameters(), expected.parameters(), strict=True) if p.requires_grad]
        agree(group, all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs), f"step {step}")
        ddp.zero_grad()
        expected.zero_grad()


def test_buckets_follow_the_order_of_arrival(group):
    ddp = DistributedDataParallel(Net(), process_group=group, bucket_cap_mb=0.0005)
    before = ddp.reducer.buckets()
    order = [place for indices in before for place in indices]
    train(group, ddp, 2, True)
    after = [place for indices in ddp.reducer.buckets() for place in indices]
    agree(group, sorted(order) == sorted(after) and len(before) > 2)
    told = group.all_gather_object(ddp.reducer.buckets())
    agree(group, all(buckets == told[0] for buckets in told))


def test_buckets_are_launched_in_the_order_of_the_plan(group):
    ddp = DistributedDataParallel(Net(), process_group=group, bucket_cap_mb=0.0005)
    launched = []

    def hook(state, bucket):
        launched.append((bucket.index(), bucket.is_last()))
        assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        return group.all_reduce(bucket.buffer(), "avg", async_op=True).get_future()

    ddp.register_comm_hook(None, hook)
    net = train(group, ddp, 3, True)
    count = len(ddp.reducer.buckets())
    agree(group, launched[-count:] == [(i, i == count - 1) for i in range(count)], str(launched))
    agree(group, same_everywhere(group, net) and close(net, reference(group.size, 3)))


def test_parameters_that_differ_are_named(group):
    if group.size == 1:
        return
    module = torch.nn.Linear(3, 4 if group.rank == 0 else 5)
    raises_on_all(group, DisagreementError, lambda: DistributedDataParallel(module, process_group=group), "rank 0: weight (4, 3)")


def test_rank_0s_parameters_and_buffers_hold(group):
    torch.manual_seed(group.rank)
    module = torch.nn.BatchNorm1d(3)
    torch.nn.init.normal_(module.weight)
    module.running_mean.fill_(group.rank)
    ddp = DistributedDataParallel(module, process_group=group)
    agree(group, same_everywhere(group, ddp) and bool((module.running_mean == 0).all()))
