"""Training loops with both DistributedDataParallel, and resumption on another number of ranks."""

from __future__ import annotations

import copy

import pytest
import torch

from mpidist import ddp as mddp
from mpidist.zero.optimizer import OSS
from tests.tools.support import agree
from tests.zero import nets

pytestmark = pytest.mark.mpi


class Net(torch.nn.Module):
    """Net with tied weights, a channels_last convolution and a parameter unused in some steps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(11)
        self.inner = torch.nn.Linear(16, 16)
        self.outer = torch.nn.Linear(16, 16)
        self.outer.weight = self.inner.weight
        self.conv = torch.nn.Conv2d(1, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.last = torch.nn.Linear(48, 5)

    def forward(self, x):
        h = torch.relu(self.outer(torch.tanh(self.inner(x)))) * self.scale
        return self.last(self.conv(h.view(-1, 1, 4, 4)).flatten(1))


def batch(rank, step):
    generator = torch.Generator().manual_seed(step * 10 + rank)
    return torch.randn(4, 16, generator=generator), torch.randint(0, 5, (4,), generator=generator)


def epoch(net, optimizer, rank, steps, clip=None):
    """Train like a usual script."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        x, target = batch(rank, step)
        net.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), target)
        loss.backward()
        if clip is not None:
            clip()
        optimizer.step()
        scheduler.step()
    return [parameter.detach().clone() for parameter in net.parameters()]


@pytest.mark.parametrize("kind", ["greedy", "flat"])
@pytest.mark.parametrize("whose", ["torch's", "ours"])
def test_same_bits_as_the_plain_optimizer_under_ddp(default_group, group, whose, kind):
    def wrapped(net):
        if whose == "ours":
            return mddp.DistributedDataParallel(net, process_group=group)
        return torch.nn.parallel.DistributedDataParallel(
            net, gradient_as_bucket_view=kind == "flat"
        )

    results = []
    for sharded in (False, True):
        net = Net()
        if sharded and kind == "flat":  # before or after the module: both must work
            optimizer = OSS(net.parameters(), torch.optim.AdamW, group, partition=kind, lr=0.02)
            results.append(epoch(wrapped(net), optimizer, group.rank, 6))
            continue
        ddp = wrapped(net)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.02)
        if sharded:
            optimizer = OSS(
                ddp.parameters(),
                torch.optim.AdamW,
                None if whose == "torch's" else group,
                lr=0.02,
                one_copy=True,
            )
        results.append(epoch(ddp, optimizer, group.rank, 6))
        group.barrier()
    agree(
        group,
        all(map(nets.same_bits, *results)),
        str([float((a - b).abs().max()) for a, b in zip(*results, strict=True)]),
    )


@pytest.mark.parametrize("whose", ["torch's", "ours"])
def test_a_module_is_wrapped_behind_the_optimizer_and_again(default_group, group, whose):
    """Ranks that began apart take rank 0's values; equal values leave master copies as they are."""

    def wrapped(net):
        if whose == "ours":
            return mddp.DistributedDataParallel(net, process_group=group)
        return torch.nn.parallel.DistributedDataParallel(net)

    for options in (
        {},
        {"partition": "flat"},
        {"one_copy": True},
        {"wire": "bf16"},
    ):
        results = []
        for is_first in (False, True):
            torch.manual_seed(group.rank)
            net = torch.nn.Sequential(torch.nn.Linear(16, 9), torch.nn.Linear(9, 5))
            model = wrapped(net) if is_first else net
            optimizer = OSS(net.parameters(), torch.optim.AdamW, group, lr=0.02, **options)
            model = model if is_first else wrapped(net)
            results.append(epoch(model, optimizer, group.rank, 2))
        agree(group, all(map(nets.same_bits, *results)), str(options))
        if options.get("wire") == "bf16":
            before = optimizer.rank_local_state_dict()["masters"]
            wrapped(net)
            after = optimizer.rank_local_state_dict()["masters"]
            agree(group, all(map(nets.same_bits, before, after)), "master copies are rounded")


def test_a_loop_that_clips_and_saves_goes_on_as_if_it_had_never_stopped(group):
    """Train, consolidate on one rank, save, rebuild everything, load, continue."""

    def optimizer_of(net):
        return OSS(
            params=net.parameters(), optim=torch.optim.SGD, group=group, lr=0.1, momentum=0.9
        )

    net = mddp.DistributedDataParallel(Net(), process_group=group)
    optimizer = optimizer_of(net)
    epoch(net, optimizer, group.rank, 3, lambda: optimizer.clip_grad_norm(0.5))
    optimizer.consolidate_state_dict(recipient_rank=0)
    saved = [
        copy.deepcopy((net.module.state_dict(), optimizer.state_dict()))
        if group.rank == 0
        else None
    ]
    group.broadcast_object_list(saved, 0)
    whole = epoch(net, optimizer, group.rank, 3, lambda: optimizer.clip_grad_norm(0.5))

    again = mddp.DistributedDataParallel(Net(), process_group=group)
    resumed = optimizer_of(again)
    again.module.load_state_dict(saved[0][0])
    before = copy.deepcopy(saved[0][1])
    resumed.load_state_dict(saved[0][1])
    agree(group, not nets.state_differences(saved[0][1], before), "the argument was changed")
    parts = epoch(again, resumed, group.rank, 3, lambda: resumed.clip_grad_norm(0.5))
    agree(group, all(map(nets.same_bits, whole, parts)))


@pytest.mark.parametrize("name", ["AdamW", "SGD-momentum", "Muon", "ASGD"])
def test_saved_on_all_ranks_loaded_on_fewer(group, name):
    optim, settings = nets.OPTIMIZERS[name]
    kinds = nets.partitions_of(name)
    first = nets.parameters_for(name)
    sharded = OSS(first, optim, group, partition=kinds[-1], **settings)
    plain_parameters = nets.parameters_for(name)
    plain = optim(plain_parameters, **settings)
    for place in range(5):
        for optimizer, parameters in ((sharded, first), (plain, plain_parameters)):
            nets.give_gradients(parameters, place)
            optimizer.step()
    saved = sharded.state_dict(all_ranks=True)
    values = [parameter.detach().clone() for parameter in first]
    for place in range(5, 9):
        nets.give_gradients(plain_parameters, place)
        plain.step()
    wrong = []
    for size in range(1, group.size):
        fewer = group.new_group(range(size))
        if fewer is None:
            continue
        for kind in kinds:
            parameters = [
                torch.nn.Parameter(v.clone(), requires_grad=p.requires_grad)
                for v, p in zip(values, first, strict=True)
            ]
            resumed = OSS(parameters, optim, fewer, partition=kind, **{**settings, "lr": 7.0})
            resumed.load_state_dict(saved)
            for place in range(5, 9):
                nets.give_gradients(parameters, place)
                resumed.step()
            if found := nets.differences(resumed, plain):
                wrong.append(f"{size} ranks, {kind}: {found}")
        fewer.close()
    agree(group, not wrong, str(wrong))
