"""Steps within the backward pass: bits of a plain optimizer, with both modules; errors."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torchs

from mpidist.ddp.hooks.default import allreduce_hook, bf16_compress_wrapper, fp16_compress_hook
from mpidist.ddp.module import DistributedDataParallel
from mpidist.errors import DisagreementError
from mpidist.zero.optimizer import OSS
from mpidist.zero.step.backward_steps import step_only
from mpidist.zero.step.setting_changes import SettingChanges
from mpidist.zero.zero_redundancy import ZeroRedundancyOptimizer, hook_with_zero_step
from tests.tools.support import agree, raises_on_all
from tests.zero.models import SETTINGS, Model, backward, trained, unequal_parameters, wrapped

HOOKS = {
    "mpidist": {
        "average": allreduce_hook,
        "fp16": fp16_compress_hook,
        "compressed": bf16_compress_wrapper(allreduce_hook),
    },
    "torch": {"average": torchs.allreduce_hook, "fp16": torchs.fp16_compress_hook},
}


def test_a_subset_is_stepped_alone():
    tensors = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    for tensor in tensors:
        tensor.grad = torch.ones(2)
    optim = torch.optim.Adam([{"params": tensors[:2]}, {"params": tensors[2:]}], lr=0.1)
    step_only(optim, [tensors[1]], SettingChanges())
    assert [bool(tensor.ne(1).any()) for tensor in tensors] == [False, True, False]
    assert [len(group["params"]) for group in optim.param_groups] == [2, 1] and list(
        optim.state
    ) == [tensors[1]]


@pytest.mark.mpi
@pytest.mark.usefixtures("default_group")
@pytest.mark.parametrize("kind", ["mpidist", "torch"])
@pytest.mark.parametrize("in_thread", [False, True])
def test_bits_of_a_plain_optimizer(group, kind, in_thread, monkeypatch):
    """Includes schedulers, accumulating passes, and parameters unused on this rank or on all.

    Every pair of optimizer, partition and view for the plain average; Adam in the other hooks.
    """
    monkeypatch.setattr(type(group), "is_single_node", not in_thread)
    wrong = []
    for (number, name), partition, hook, as_view in itertools.product(
        enumerate(SETTINGS), ("greedy", "flat"), HOOKS[kind], (False, True)
    ):
        is_pair = name == "Muon" or (as_view == (partition == "flat")) == (number % 2 == 0)
        if (name == "Muon" and partition == "flat") or (
            not is_pair if hook == "average" else name != "Adam" or as_view
        ):
            continue
        optim, settings = SETTINGS[name]
        options = {"find_unused_parameters": True, "gradient_as_bucket_view": as_view}
        plain, sharded = (wrapped(group, kind, Model(name == "Muon"), **options) for _ in range(2))
        its = optim(plain.parameters(), **settings)
        oss = OSS(sharded.parameters(), optim, group, partition=partition, **settings)
        stepping = oss.stepping_hook(HOOKS[kind][hook])
        state = group if kind == "mpidist" else None
        plain.register_comm_hook(state, HOOKS[kind][hook])
        sharded.register_comm_hook(state, stepping)
        trained(group, plain, its, range(4), schedules=True)
        trained(group, sharded, oss, range(4), schedules=True)
        differing = unequal_parameters(sharded, plain)
        oss.consolidate_state_dict(0)
        if group.rank == 0:
            saved, expected = oss.state_dict()["state"], its.state_dict()["state"]
            steps = [
                key
                for key in expected
                if not torch.equal(
                    saved[key].get("step", torch.ones(1)), expected[key].get("step", torch.ones(1))
                )
            ]
            differing += f" steps of {steps}" if steps else ""
        if differing:
            wrong.append(f"{name} {partition} {hook} view={as_view}: {differing}")
    agree(group, not wrong, "; ".join(wrong))


class CountsInGroup(torch.optim.Optimizer):
    """Momentum with a bias correction by the group's count of steps, as apex and timm keep it.

    Args:
        kind: Holder of the count: ``"group"``, ``"tensor"`` in the group, ``"attribute"`` of the
            optimizer, or ``"held"`` by groups that have parameters.
    """

    def __init__(self, params, lr=0.01, kind="group"):
        super().__init__(params, {"lr": lr, "kind": kind})
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            if group["kind"] == "held" and not group["params"]:
                continue
            if group["kind"] != "tensor":
                group["step"] = group.get("step", 0) + 1
            elif "step" in group:
                group["step"] += 1
            else:
                group["step"] = torch.ones((), dtype=torch.int64)
            count = self.count if group["kind"] == "attribute" else int(group["step"])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["mean"] = torch.zeros_like(parameter)
                    state["mean"].lerp_(parameter.grad, 0.1)
                    parameter.sub_(group["lr"] * state["mean"] / (1 - 0.9**count))


@pytest.mark.mpi
@pytest.mark.usefixtures("default_group")
@pytest.mark.parametrize("count", ["group", "tensor", "attribute", "held"])
def test_an_optimizer_that_counts_in_its_groups_counts_each_step_once(group, count):
    wrong = []
    for kind, completes, schedules in itertools.product(
        ("mpidist", "torch"), (False, True), (False, True)
    ):
        # A scheduler counts the calls of step().
        if completes and schedules:
            continue
        plain, sharded = (
            wrapped(group, kind, Model(), find_unused_parameters=True) for _ in range(2)
        )
        first, second = (
            [
                {"params": list(ddp.parameters())[:4]},
                {"params": list(ddp.parameters())[4:], "lr": 0.02},
            ]
            for ddp in (plain, sharded)
        )
        its = CountsInGroup(first, kind=count)
        hook, state = (
            (allreduce_hook, group) if kind == "mpidist" else (torchs.allreduce_hook, None)
        )
        if completes:
            oss = ZeroRedundancyOptimizer(second, CountsInGroup, overlap_with_ddp=True, kind=count)
            stepping = hook_with_zero_step(hook, sharded, oss)
        else:
            oss = OSS(second, CountsInGroup, group, kind=count)
            stepping = oss.stepping_hook(hook)
        plain.register_comm_hook(state, hook)
        sharded.register_comm_hook(state, stepping)
        trained(group, plain, its, range(4), schedules=schedules)
        trained(group, sharded, oss, range(4), completes, schedules=schedules)
        case = f"{kind} completes={completes} schedules={schedules}"
        if names := unequal_parameters(sharded, plain):
            wrong.append(f"{case}: {names}")
        counts = [
            int(one["step"])
            for one, own in zip(oss.param_groups, oss.optim.param_groups, strict=True)
            if own["params"] or count != "held"
        ]
        if set(counts) != {4} or oss.optim.count != 4:
            wrong.append(f"{case}: counts {counts} and {oss.optim.count}")
    agree(group, not wrong, "; ".join(wrong))


@pytest.mark.mpi
def test_the_step_is_taken_in_the_backward_pass(group):
    """Owned parameters change within the pass; sparse gradients are stepped by step()."""
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4, sparse=True), torch.nn.Linear(4, 4))
    plain = torch.nn.Sequential(torch.nn.Embedding(8, 4, sparse=True), torch.nn.Linear(4, 4))
    plain.load_state_dict(model.state_dict())
    ddps = [DistributedDataParallel(each, process_group=group) for each in (model, plain)]
    oss, its = (
        OSS(ddps[0].parameters(), torch.optim.SGD, group, lr=0.1),
        torch.optim.SGD(plain.parameters(), lr=0.1),
    )
    ddps[0].register_comm_hook(group, oss.stepping_hook(allreduce_hook))
    before = model[1].weight.detach().clone()
    for ddp in ddps:
        ddp(torch.arange(3) + group.rank).square().sum().backward()
    is_mine = any(piece.parameter is model[1].weight for piece in oss._shards.pieces)
    agree(
        group, torch.equal(before, model[1].weight) != is_mine, "stepped too early, or not at all"
    )
    oss.step()
    its.step()
    agree(group, not unequal_parameters(model, plain), unequal_parameters(model, plain))


@pytest.mark.mpi
def test_what_cannot_be_is_refused_by_all(group):
    ddp = DistributedDataParallel(Model(), process_group=group, find_unused_parameters=True)
    oss = OSS(ddp.parameters(), torch.optim.Adam, group)
    raises_on_all(group, TypeError, lambda: oss.stepping_hook(None), "NoneType")
    ddp.register_comm_hook(group, oss.stepping_hook(allreduce_hook))
    backward(ddp, group.rank, 0)
    raises_on_all(group, RuntimeError, lambda: backward(ddp, group.rank, 0), "no_sync()")
    raises_on_all(group, RuntimeError, lambda: oss.step(lambda: 0.0), "closure")
    raises_on_all(group, RuntimeError, lambda: oss.clip_grad_norm(1.0), "clip_grad_norm")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    raises_on_all(group, RuntimeError, lambda: scaler.step(oss), "GradScaler")
    if group.size > 1:
        one = OSS([torch.nn.Parameter(torch.ones(4))], torch.optim.SGD, group, one_copy=True)
        raises_on_all(group, ValueError, lambda: one.stepping_hook(allreduce_hook), "one_copy")


@pytest.mark.mpi
def test_an_error_on_one_rank_reaches_all_in_step(group):
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            if group.rank == group.size - 1:
                raise KeyError("mine")
            return super().step(closure)

    ddp = DistributedDataParallel(Model(), process_group=group, find_unused_parameters=True)
    oss = OSS(ddp.parameters(), Fails, group, lr=0.1)
    ddp.register_comm_hook(group, oss.stepping_hook(allreduce_hook))
    backward(ddp, group.rank, 0)
    raises_on_all(
        group, KeyError if group.rank == group.size - 1 else DisagreementError, oss.step, "mine"
    )
