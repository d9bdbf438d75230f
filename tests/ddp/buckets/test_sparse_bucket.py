"""Sparse gradients in DDP: k ranks × batch b train like one rank × batch k·b.

The gradients stay sparse.
"""

import itertools

import pytest
import torch

from mpidist.ddp.hooks.default import allreduce_hook, fp16_compress_hook
from mpidist.ddp.hooks.powersgd import powerSGD_hook
from mpidist.ddp.hooks.powersgd_state import PowerSGDState
from mpidist.ddp.module import DistributedDataParallel
from tests.ddp.nets import close, same_everywhere
from tests.tools.support import agree, raises_on_all

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("device")]

WORDS, WIDTH = 20, 6


class Words(torch.nn.Module):
    """Two sparse tables (one unused, if ``with_unused``), dense layers between and after them."""

    def __init__(self, sparse=True, with_unused=False):
        super().__init__()
        torch.manual_seed(5)
        self.table = torch.nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.first = torch.nn.Linear(WIDTH, 8)
        self.bags = torch.nn.EmbeddingBag(WORDS, 8, mode="sum", sparse=sparse)
        self.last = torch.nn.Linear(8, 3)
        self.unused = torch.nn.Embedding(WORDS, 2, sparse=sparse) if with_unused else None

    def forward(self, words):
        return self.last(torch.tanh(self.first(self.table(words).mean(1)) + self.bags(words)))


def words_of(rank, step):
    # Ranks have some words in common and others alone; some words appear twice.
    return torch.randint(
        0, WORDS, (4, 3), generator=torch.Generator().manual_seed(100 * step + rank)
    ) // (1 + rank % 2)


def loss_of(net, rank, step):
    return net(words_of(rank, step)).square().sum()


def train(group, ddp, inputs, accumulates=False, set_to_none=True, joins=False):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with ddp.join(enable=joins):
        for step in range(inputs[group.rank]):
            if accumulates:
                with ddp.no_sync():
                    loss_of(ddp, group.rank, step + 50).backward()
            loss_of(ddp, group.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none)
    return ddp.module


def reference(inputs, accumulates=False, **options):
    net = Words(sparse=False, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(max(inputs)):
        for rank in [rank for rank in range(len(inputs)) if step < inputs[rank]]:
            for part in [step + 50, step] if accumulates else [step]:
                (loss_of(net, rank, part) / len(inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("in_thread", [False, True])
def test_training_equals_training_in_one_process(group, view, in_thread, monkeypatch):
    monkeypatch.setattr(type(group), "is_single_node", not in_thread)
    options = [
        {},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"bucket_cap_mb": 1e-5, "most_buckets": 3},
    ]
    for chosen, accumulates, joins in itertools.product(options, [False, True], [False, True]):
        ddp = DistributedDataParallel(
            Words(), process_group=group, gradient_as_bucket_view=view, **chosen
        )
        inputs = [2 + rank if joins else 3 for rank in range(group.size)]
        net = train(group, ddp, inputs, accumulates, set_to_none=not joins, joins=joins)
        text = f"{chosen} no_sync {accumulates} join {joins}"
        agree(group, same_everywhere(group, net), f"ranks differ: {text}")
        agree(
            group, close(net, reference(inputs, accumulates)), f"differs from one process: {text}"
        )


def test_the_average_is_sparse_and_the_same_on_all_ranks(group):
    ddp = DistributedDataParallel(
        Words(with_unused=True), process_group=group, find_unused_parameters=True
    )
    loss_of(ddp, group.rank, 0).backward()
    net = ddp.module
    gradient = net.table.weight.grad
    agree(group, gradient.is_sparse and gradient.is_coalesced() and net.unused.weight.grad is None)
    used = torch.unique(torch.cat([words_of(rank, 0).flatten() for rank in range(group.size)]))
    agree(group, torch.equal(gradient.indices()[0].cpu(), used.cpu()), str(gradient))
    gathered = group.all_gather_object(gradient.values())
    agree(group, all(torch.equal(values, gathered[0]) for values in gathered))
    sparse = [index for index, places in enumerate(ddp.reducer.layout.plan) if len(places) == 1]
    agree(group, ddp.reducer.layout.sparse <= set(sparse) and len(ddp.reducer.layout.sparse) == 3)


def test_hooks_get_the_dense_buckets_alone(group):
    """The last dense bucket is a hook's last; PowerSGD counts its steps by it."""
    for hook, tolerance in ((allreduce_hook, 1e-5), (fp16_compress_hook, 1e-2)):
        seen = []

        def spy(state, bucket, hook=hook, seen=seen):
            seen.append((bucket.names(), bucket.is_last()))
            return hook(state, bucket)

        ddp = DistributedDataParallel(Words(), process_group=group, bucket_cap_mb=1e-5)
        ddp.register_comm_hook(group, spy)
        net = train(group, ddp, [2] * group.size)
        agree(
            group,
            same_everywhere(group, net) and close(net, reference([2] * group.size), tolerance),
        )
        names = [name for bucket, _ in seen for name in bucket]
        agree(
            group,
            not any("table" in name or "bags" in name for name in names)
            and [last for _, last in seen].count(True) == 2,
        )
    ddp = DistributedDataParallel(Words(), process_group=group, bucket_cap_mb=1e-5)
    state = PowerSGDState(group, 8, start_powerSGD_iter=1, min_compression_rate=0.01)
    ddp.register_comm_hook(state, powerSGD_hook)
    net = train(group, ddp, [3] * group.size)
    agree(
        group,
        same_everywhere(group, net)
        and close(net, reference([3] * group.size), 1e-3)
        and state.iter == 3,
    )
    agree(group, bool(state.error_dict) and not any("table" in name for name in state.error_dict))


def test_a_rank_without_inputs_keeps_its_sparse_gradient(group):
    ddp = DistributedDataParallel(Words(), process_group=group)
    with ddp.join():
        for step in range(1 + group.rank):
            ddp.zero_grad()
            loss_of(ddp, group.rank, step).backward()
            kept = ddp.module.table.weight.grad.clone()
    gradient = ddp.module.table.weight.grad
    agree(group, torch.equal(gradient.to_dense(), kept.to_dense()) and gradient.is_sparse)


def test_a_layout_that_the_module_does_not_announce_raises_on_all_ranks(group):
    """One rank alone has the gradient; the others would wait for its bucket."""

    class Shared(torch.nn.Module):
        def __init__(self, announced):
            super().__init__()
            self.table = torch.nn.Embedding(5, 2, sparse=announced)

        def forward(self, words, sparse):
            return torch.nn.functional.embedding(words, self.table.weight, sparse=sparse).sum()

    last = group.size - 1
    for announced, view in itertools.product([True, False], [True, False]):
        ddp = DistributedDataParallel(
            Shared(announced), process_group=group, gradient_as_bucket_view=view
        )
        wrong = not announced

        def step(ddp=ddp, wrong=wrong, announced=announced):
            ddp.zero_grad()
            ddp(torch.tensor([1, 2]), wrong if group.rank == last else announced).backward()

        match = (
            "is dense, but its module announces sparse"
            if announced
            else "its module does not announce it"
        )
        text = raises_on_all(group, RuntimeError, step, match)
        agree(group, f"rank {last}: " in text and "table.weight" in text, text)
        ddp.zero_grad()
        ddp(torch.tensor([1, 2]), announced).backward()
        agree(
            group,
            (ddp.module.table.weight.grad.layout is torch.sparse_coo) == announced,
            "and the next step is right",
        )
