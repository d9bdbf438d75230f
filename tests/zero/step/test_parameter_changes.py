"""Changes of parameters during training (added, frozen, moved), against the plain optimizer."""

from __future__ import annotations

import pytest
import torch

from mpidist.errors import DisagreementError
from mpidist.zero.optimizer import OSS
from tests.tools.support import agree, raises_on_all
from tests.zero import nets

pytestmark = pytest.mark.mpi


def pair(group, name="NAdam", kind="greedy", **chosen):
    """Return a sharded and a plain optimizer over equal parameters."""
    optim, settings = nets.OPTIMIZERS[name]
    sharded = OSS(nets.parameters_for(name), optim, group, partition=kind, **chosen, **settings)
    return sharded, optim(nets.parameters_for(name), **settings)


def step(*optimizers, number=0):
    for optimizer in optimizers:
        nets.give_gradients(nets.all_parameters(optimizer), number)
        optimizer.step()


def require_equal(group, sharded, plain):
    wrong = nets.differences(sharded, plain)
    agree(group, not wrong, wrong)


@pytest.mark.parametrize("kind", ["greedy", "flat"])
@pytest.mark.parametrize("way", nets.WAYS)
def test_a_moved_parameter_is_followed_to_its_new_memory(group, kind, way):
    """New memory on one rank or all; another dtype for some or all; another order of elements."""

    def elsewhere(parameters):
        for parameter in parameters[::2]:
            parameter.data = parameter.detach().clone()

    def wider(parameters):
        for number in (0, 4, 5):
            parameters[number].data = parameters[number].detach().double()

    def narrower(parameters):
        for parameter in parameters:
            if parameter.dtype is torch.float64:
                parameter.data = parameter.detach().float()

    def other_order(parameters):
        parameters[4].data = parameters[4].detach().contiguous()
        parameters[0].data = parameters[0].detach().t().contiguous().t()

    with nets.memory(way) as chosen:
        sharded, plain = pair(group, "NAdam", kind, **chosen)
        own, other = nets.all_parameters(sharded), nets.all_parameters(plain)
        step(sharded, plain)
        if group.rank == group.size - 1:
            elsewhere(own)
        step(sharded, plain, number=1)
        require_equal(group, sharded, plain)
        for number, change in enumerate((elsewhere, wider, narrower, other_order)):
            kinds = [parameter.dtype for parameter in other]
            change(own)
            change(other)
            changed = [p for p, kind in zip(other, kinds, strict=True) if p.dtype is not kind]
            # As a loaded state takes the parameter's dtype, but for scalars.
            for parameter in changed:
                held = plain.state.get(parameter, {})
                moments = ("exp_avg", "exp_avg_sq")
                held.update({k: v.to(parameter.dtype) for k, v in held.items() if k in moments})
            step(sharded, plain, number=2 + number)
            require_equal(group, sharded, plain)
    agree(
        group,
        not sharded._shards.has_moved() and [p.dtype for p in own] == [p.dtype for p in other],
    )


def test_a_moved_parameter_that_fits_no_more_is_refused_on_all_ranks(group):
    sharded, plain = pair(group)
    step(sharded, plain)
    (first, *_) = own = nets.all_parameters(sharded)
    before = first.detach().clone()
    first.data = torch.zeros(3, 3)
    raises_on_all(group, ValueError, sharded.step, "parameter 0 had shape (37, 19)")
    first.data = before
    nets.give_gradients(own, 1)
    sharded.step()
    step(plain, number=1)
    require_equal(group, sharded, plain)


@pytest.mark.parametrize("kind", ["balanced", "flat"])
def test_training_again_is_noticed_at_the_step(group, kind):
    """Without refresh_trainable only the owner would step the parameter."""
    sharded, plain = pair(group, kind=kind)
    step(sharded, plain)
    for optimizer in (sharded, plain):
        nets.all_parameters(optimizer)[1].requires_grad_(True)
        nets.all_parameters(optimizer)[5].requires_grad_(False)
    step(sharded, plain, number=1)
    require_equal(group, sharded, plain)


@pytest.mark.parametrize("kind", ["balanced", "flat"])
def test_training_again_is_noticed_when_a_group_is_added(group, kind):
    sharded, plain = pair(group, "AdamW", kind)
    step(sharded, plain)
    for optimizer in (sharded, plain):
        nets.all_parameters(optimizer)[1].requires_grad_(True)
        optimizer.add_param_group({"params": nets.late()})
    step(sharded, plain, number=1)
    require_equal(group, sharded, plain)


class Imitating:
    """Wrapper that derives from the optimizer's class and delegates to it, as Fabric's."""

    def __init__(self, optimizer):
        self.__class__ = type("Imitating", (Imitating, type(optimizer)), {})
        self.param_groups = optimizer.param_groups
        self._wrapped = optimizer

    def __getattr__(self, name):
        return getattr(self._wrapped, name)


def test_a_group_added_through_an_imitating_wrapper_is_stepped(group):
    sharded, plain = pair(group)
    step(sharded, plain)
    for optimizer in (Imitating(sharded), plain):
        optimizer.add_param_group({"params": nets.late()})
    step(sharded, plain, number=1)
    require_equal(group, sharded, plain)


@pytest.mark.parametrize("kind", ["balanced", "flat"])
def test_a_frozen_parameter_keeps_its_value_and_leaves_the_buffers(group, kind):
    sharded, _ = pair(group, "SGD-momentum", kind)
    step(sharded)
    own = nets.all_parameters(sharded)
    values = [parameter.detach().clone() for parameter in own]
    for parameter in (own[0], own[5]):  # keep their last gradients
        parameter.requires_grad_(False)
    sharded.refresh_trainable()
    own[1].grad = torch.ones_like(own[1])  # never trained
    gradients = [parameter.grad for parameter in own]
    sharded.step()
    kept = [torch.equal(parameter, value) for parameter, value in zip(own, values, strict=True)]
    # Parameter 6 is empty.
    agree(group, [place for place, same in enumerate(kept) if same] == [0, 1, 5, 6], str(kept))
    agree(
        group,
        all(parameter.grad is gradient for parameter, gradient in zip(own, gradients, strict=True)),
    )
    flat = {tensor.untyped_storage().data_ptr() for tensor in sharded._shards.flats}
    inside = [parameter.untyped_storage().data_ptr() in flat for parameter in own]
    agree(
        group,
        not inside[0] and not inside[1] and not inside[5] and inside[2] and inside[11],
        str(inside),
    )


def test_a_frozen_parameter_comes_back_with_the_dtype_that_it_has_now(group):
    sharded, _ = pair(group, "SGD-momentum")
    own = nets.all_parameters(sharded)
    own[5].requires_grad_(False)
    sharded.refresh_trainable()
    own[5].data = own[5].detach().double() + 1e-12
    value = own[5].detach().clone()
    own[5].requires_grad_(True)
    sharded.refresh_trainable()
    agree(group, own[5].dtype is torch.float64 and torch.equal(own[5], value))
    step(sharded)
    agree(group, not torch.equal(own[5], value))


def test_a_group_that_is_added_takes_the_settings_of_now(group):
    sharded, plain = pair(group, "AdamW")
    for optimizer in (sharded, plain):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        step(optimizer)
        scheduler.step()
        torch.manual_seed(8)
        optimizer.add_param_group(
            {
                "params": [torch.nn.Parameter(torch.randn(70, 3))],
                "betas": (0.5, 0.6),
                "weight_decay": 0.0,
            }
        )
        step(optimizer, number=1)
        scheduler.step()
        optimizer.param_groups[1]["lr"] = 0.3
        step(optimizer, number=2)
    require_equal(group, sharded, plain)


@pytest.mark.parametrize("kind", ["greedy", "balanced", "flat"])
def test_a_refused_group_leaves_no_trace(group, kind):
    sharded, plain = pair(group, kind=kind)
    step(sharded, plain)
    own = nets.all_parameters(sharded)
    new = torch.nn.Parameter(torch.ones(5, 5))
    shared = torch.nn.Parameter(new.detach())
    refusals = [
        (ValueError, {"params": [own[0]]}, "more than one parameter group"),
        (ValueError, {"params": [new, shared]}, "same memory"),
        (TypeError, {"params": ["no tensor"]}, "Tensor"),
    ]
    for error, added, words in refusals:
        raises_on_all(group, error, lambda added=added: sharded.add_param_group(added), words)
    if group.size > 1:
        differing = [
            {"params": [torch.nn.Parameter(torch.ones(5 + group.rank))]},
            {"params": [new], "lr": 0.1 + group.rank},
            {"params": [new] * (group.rank == 0) + [torch.nn.Parameter(torch.ones(3))]},
        ]
        for added in differing:
            raises_on_all(
                group,
                DisagreementError,
                lambda added=added: sharded.add_param_group(added),
                "ranks differ",
            )
        caught = None
        try:
            sharded.add_param_group({"params": [new if group.rank else own[0]]})
        except (ValueError, DisagreementError) as error:
            caught = str(error)
        agree(group, caught is not None and "more than one parameter group" in caught, str(caught))
    step(sharded, plain, number=1)
    require_equal(group, sharded, plain)


def test_ranks_that_freeze_different_parameters_raise_on_all(group):
    sharded, _ = pair(group)
    if group.size == 1:
        sharded.refresh_trainable()
        return
    own = nets.all_parameters(sharded)
    own[0].requires_grad_(group.rank > 0)
    raises_on_all(group, DisagreementError, sharded.refresh_trainable, "group 0 parameter 0")
    own[0].requires_grad_(True)
    own[1].requires_grad_(group.rank > 0)
    nets.give_gradients(own, 0)
    raises_on_all(group, DisagreementError, sharded.step, "group 0 parameter 1")
    own[1].requires_grad_(False)
    sharded.step()


@pytest.mark.parametrize("kind", ["greedy", "flat"])
def test_partition_parameters_lists_what_each_rank_owns(group, kind):
    sharded, _ = pair(group, kind=kind)
    sharded.add_param_group({"params": nets.late(), "lr": 0.5})
    own = nets.all_parameters(sharded)
    parts = sharded.partition_parameters()
    agree(group, len(parts) == group.size and all(len(rank) == 2 for rank in parts))
    agree(
        group,
        all(
            rank[1]["lr"] == 0.5
            and rank[0]["betas"] == (0.9, 0.999)
            and "param_names" not in rank[0]
            for rank in parts
        ),
    )
    count = sum(tensor.numel() for rank in parts for part in rank for tensor in part["params"])
    agree(group, count == sum(parameter.numel() for parameter in own))
    held = sharded.optim.param_groups
    elements = [
        [tensor.numel() for tensor in part["params"] if tensor.requires_grad or kind == "flat"]
        for part in held
    ]
    expected = [
        [t.numel() for t in part["params"] if t is not own[1] and t is not own[6]]
        for part in parts[group.rank]
    ]
    if kind == "greedy":
        agree(group, all(a is b for one, two in zip(held, parts[group.rank], strict=True)
                         for a, b in zip(one["params"], two["params"], strict=True)))  # fmt: skip
    else:
        agree(
            group,
            [[n for n in group_of if n] for group_of in elements] == expected,
            f"{elements} {expected}",
        )
    addresses = {
        t.untyped_storage().data_ptr()
        for rank in parts
        for part in rank
        for t in part["params"]
        if t.numel()
    }
    agree(group, addresses <= {p.untyped_storage().data_ptr() for p in own})
    bounds = sharded.bounds()
    agree(group, own[1] not in bounds and own[6] not in bounds and len(bounds) == len(own) - 2)
    for parameter, spans in bounds.items():
        ends = [0, *(stop for _, _, stop in spans)]
        agree(
            group, [start for _, start, _ in spans] == ends[:-1] and ends[-1] == parameter.numel()
        )
