"""Post-local SGD against a naive twin, and against torch's hook on torch's DDP."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as theirs
from torch.distributed.algorithms.model_averaging import averagers as torchs_averagers
from torch.distributed.optim import PostLocalSGDOptimizer as TorchsOptimizer

from mpidist.comm.mpi import runtime
from mpidist.ddp.hooks.post_localsgd import PostLocalSGDState, post_localSGD_hook
from mpidist.ddp.model_averaging.averagers import PeriodicModelAverager
from mpidist.ddp.module import DistributedDataParallel
from mpidist.optim.post_localsgd import PostLocalSGDOptimizer
from tests.support import agree, raises_on_all

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("device")]


def pairs(ranks):
    return tuple(rank // 2 for rank in range(len(ranks)))


def gradient(rank, step):
    return torch.arange(4.0) * (rank + 1) + step


def expected_gradients(rank, size, step, start, locally):
    if step < start:
        members = range(size)
    else:
        members = [other for other in range(size) if other // 2 == rank // 2] if locally else [rank]
    return sum(gradient(other, step) for other in members) / len(members)


@pytest.mark.parametrize("locally", [True, False])
@pytest.mark.parametrize("given", [True, False], ids=["a subgroup", "by node"])
def test_all_ranks_are_averaged_first_and_then_the_node_alone(group, monkeypatch, locally, given):
    monkeypatch.setattr(runtime.World, "nodes_of", lambda self, ranks: pairs(ranks))
    whole = group.clone()  # made after the patch: nodes of two ranks
    monkeypatch.setattr(
        type(whole), "split_by_node", lambda self: self.split(self.rank // 2, self.rank)
    )
    subgroup = whole.split(whole.rank // 2, whole.rank) if given else None
    state = PostLocalSGDState(whole, subgroup, 2, locally)
    ddp = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False), process_group=whole)
    ddp.register_comm_hook(state, post_localSGD_hook)
    for step in range(5):
        ddp.zero_grad()
        ddp(gradient(whole.rank, step)).sum().backward()
        want = expected_gradients(whole.rank, whole.size, step, 2, locally)
        agree(
            group,
            torch.allclose(ddp.module.weight.grad[0], want),
            f"step {step}: {ddp.module.weight.grad} and not {want}",
        )
    agree(group, state.iter == 2)
    if state.subgroup is not None and state.subgroup is not whole:
        state.subgroup.close()
    whole.close()


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))


def trained(module, rank, optimizer):
    losses = []
    for step in range(8):
        optimizer.zero_grad()
        loss = (
            module(torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank)))
            .square()
            .mean()
        )
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return torch.cat([p.detach().flatten() for p in module.parameters()]), losses


@pytest.mark.usefixtures("default_group")
def test_training_as_with_torchs_parts_on_torchs_module(group):
    """torch's parts and ours mixed in one training, and each alone."""
    subgroup = dist.new_subgroups(group_size=1)[0]
    runs = {}
    for name, module_of, hook, state_of, averager_of, optimizer_of in [
        (
            "torch",
            torch.nn.parallel.DistributedDataParallel,
            theirs.post_localSGD_hook,
            theirs.PostLocalSGDState,
            torchs_averagers.PeriodicModelAverager,
            TorchsOptimizer,
        ),
        (
            "ours",
            DistributedDataParallel,
            post_localSGD_hook,
            PostLocalSGDState,
            PeriodicModelAverager,
            PostLocalSGDOptimizer,
        ),
        (
            "torch's parts on ours",
            DistributedDataParallel,
            theirs.post_localSGD_hook,
            theirs.PostLocalSGDState,
            torchs_averagers.PeriodicModelAverager,
            TorchsOptimizer,
        ),
        (
            "our averager",
            torch.nn.parallel.DistributedDataParallel,
            theirs.post_localSGD_hook,
            theirs.PostLocalSGDState,
            PeriodicModelAverager,
            TorchsOptimizer,
        ),
    ]:
        module = module_of(net())
        module.register_comm_hook(state_of(None, subgroup, 3), hook)
        local = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        runs[name] = trained(
            module, group.rank, optimizer_of(local, averager_of(period=4, warmup_steps=3))
        )
    for name, (weights, losses) in runs.items():
        agree(group, torch.allclose(weights, runs["torch"][0], atol=1e-6), f"{name}: weights")
        agree(group, losses == pytest.approx(runs["torch"][1], abs=1e-5), f"{name}: losses")
    rows = weights.new_empty(group.size, weights.numel())
    group.all_gather_into_tensor(rows, weights)
    agree(group, bool((rows == rows[0]).all()), "averaged at the last step")


def test_bad_settings_and_copies(group):
    for error, arguments, words in [
        (ValueError, (group, None, -1), "start_localSGD_iter must not be negative"),
        (TypeError, (group, None, 1.5), "start_localSGD_iter must be an int"),
        (TypeError, (group, "node", 1), "needs a group of mpidist"),
        (TypeError, (3, None, 1), "needs a group of mpidist"),
    ]:
        raises_on_all(
            group, error, lambda arguments=arguments: PostLocalSGDState(*arguments), words
        )
    own = group.new_group([group.rank])
    if group.size > 1:
        raises_on_all(
            group,
            ValueError,
            lambda: PostLocalSGDState(own, group, 1),
            "must be some of process_group's ranks",
        )
    state = PostLocalSGDState(group, own, 7, False)
    with pytest.warns(UserWarning, match="without its groups"):
        twin = copy.copy(state)
    agree(group, twin.process_group is twin.subgroup is None and twin.start_localSGD_iter == 7)
    own.close()
