"""Parameters of all problematic kinds, and their training by a sharded and a plain optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from mpidist.comm import shard_memory
from mpidist.zero.optimizer import OSS
from mpidist.zero.shards.partition import PARTITIONS, is_element_wise

Parameter = torch.nn.Parameter
optim = torch.optim
STEPS = 20

# Settings of each class of optimizers, one for each kind of step.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "SGD-momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "foreach": True}),
    "SGD-nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD-fused": (optim.SGD, {"lr": 0.1, "fused": True}),
    "Adam": (optim.Adam, {"lr": 0.01, "amsgrad": True, "foreach": False}),
    "Adam-foreach": (
        optim.Adam,
        {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1, "foreach": True},
    ),
    "Adam-fused": (optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "fused": True}),
    "AdamW": (optim.AdamW, {"lr": 0.01, "foreach": False}),
    "AdamW-foreach": (optim.AdamW, {"lr": 0.01, "amsgrad": True, "foreach": True}),
    "AdamW-fused": (optim.AdamW, {"lr": 0.01, "amsgrad": True, "fused": True}),
    "Adagrad": (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    "Adagrad-fused": (optim.Adagrad, {"lr": 0.1, "fused": True}),
    "RMSprop": (optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "Adadelta": (optim.Adadelta, {"lr": 1.0, "foreach": True}),
    "Adamax": (optim.Adamax, {"lr": 0.01}),
    "NAdam": (optim.NAdam, {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (optim.RAdam, {"lr": 0.01, "foreach": True}),
    "Rprop": (optim.Rprop, {"lr": 0.01}),
    "ASGD": (optim.ASGD, {"lr": 0.1, "t0": 5.0}),
    "Adafactor": (optim.Adafactor, {"lr": 0.05}),
    "Muon": (optim.Muon, {"lr": 0.05, "weight_decay": 0.1}),
}
WAYS = ("node", "one copy", "messages")


def matrices() -> list[Parameter]:
    """Return matrices of one dtype, which every optimizer accepts."""
    return [
        Parameter(torch.randn(shape)) for shape in ((37, 19), (5, 64), (1, 3), (65, 2), (9, 14))
    ]


def odd(fused: bool = False) -> list[Parameter]:
    """Return parameters of odd shapes, layouts and dtypes; the second does not train at first.

    Args:
        fused: Without parameters that torch's fused kernels do not support: complex ones, and ones
            with gaps (the kernels step the gaps too).
    """
    made = [
        torch.randn(37, 19),
        torch.randn(11),
        torch.randn(()),
        torch.randn(1),
        torch.randn(6, 5, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(64),
        torch.randn(0, 3),
        torch.randn(41, dtype=torch.float64),
        torch.randn(14, 9).t(),
        torch.randn(130).bfloat16(),
        torch.randn(65, 3),
    ]
    if not fused:
        made += [torch.randn(10, 6)[:, :5], torch.randn(17, dtype=torch.complex64)]
    parameters = [Parameter(tensor) for tensor in made]
    parameters[1].requires_grad_(False)
    return parameters


def takes_late_groups(optim: type, settings: dict[str, Any]) -> bool:
    """Return whether torch's optimizer steps a group added later; Adagrad of torch 2.9 does not."""
    first, late = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    plain = optim([first], **settings)
    plain.add_param_group({"params": [late]})
    first.grad = late.grad = torch.ones(2, 2)
    try:
        plain.step()
    except KeyError:
        return False
    return True


def parameters_for(name: str) -> list[Parameter]:
    """Return the parameters for an optimizer's tests."""
    torch.manual_seed(7)
    return odd(fused="fused" in name) if is_element_wise(OPTIMIZERS[name][0]) else matrices()


def late() -> list[Parameter]:
    """Return matrices for a group that is added later."""
    torch.manual_seed(8)
    return [Parameter(torch.randn(33, 5)), Parameter(torch.randn(3, 70))]


def give_gradients(parameters: Sequence[Parameter], step: int, sparsely: bool = False) -> None:
    """Set gradients of trained parameters, equal on all ranks, with autograd's strides.

    Args:
        sparsely: Leave some parameters without a gradient.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    for number, parameter in enumerate(parameters):
        wide = torch.complex128 if parameter.is_complex() else torch.float64
        gradient = torch.randn(parameter.shape, generator=generator, dtype=wide)
        parameter.grad = None
        if parameter.requires_grad and not (sparsely and (number + step) % 3 == 0):
            parameter.grad = torch.empty_like(parameter).copy_(gradient)


def train(
    optimizer: torch.optim.Optimizer,
    parameters: list[Parameter],
    steps: int = STEPS,
    events: bool = True,
    after: Callable[[int], Any] = lambda step: None,
) -> None:
    """Train with a schedule; ``events`` add a group, freeze parameters and train them again."""
    refresh = getattr(optimizer, "refresh_trainable", lambda: None)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    parameters = list(parameters)
    for step in range(steps):
        if events and step == 6:
            more = late()
            optimizer.add_param_group({"params": more, "lr": 0.03})
            parameters += more
        if events and step == 10:
            parameters[0].requires_grad_(False)
            refresh()
        if events and step == 14:
            for parameter in parameters:
                parameter.requires_grad_(True)
            refresh()
        give_gradients(parameters, step, sparsely=events and step in (3, 4, 11))
        optimizer.step()
        scheduler.step()
        after(step)


@contextmanager
def memory(way: str) -> Iterator[dict[str, Any]]:
    """Yield the arguments of ``OSS`` for one way of sending shards, which the context enforces."""
    with pytest.MonkeyPatch.context() as patch:
        if way == "messages":
            patch.setattr(shard_memory, "shared_maps", lambda comm, sizes: None)
        yield {"one_copy": True} if way == "one copy" else {}


def partitions_of(name: str) -> tuple[str, ...]:
    """Return the partitions that the optimizer of a name allows."""
    return PARTITIONS if is_element_wise(OPTIMIZERS[name][0]) else PARTITIONS[:2]


def all_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return an optimizer's parameters in its order."""
    return list(itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups))


def differences(sharded: OSS, plain: torch.optim.Optimizer, with_state: bool = True) -> str:
    """Return where a sharded optimizer's bits differ from a plain one's; empty if nowhere.

    Collective: over the sharded optimizer's group, if ``with_state``.
    """
    own, other = all_parameters(sharded), all_parameters(plain)
    wrong = [
        f"parameter {n}"
        for n, (a, b) in enumerate(zip(own, other, strict=True))
        if not same_bits(a.detach(), b.detach())
    ]
    if with_state:
        wrong += state_differences(sharded.state_dict(all_ranks=True), plain.state_dict())
    return ", ".join(wrong)


def state_differences(own: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the differences of two state dicts."""
    wrong = []
    if own["param_groups"] != other["param_groups"]:
        wrong.append(f"groups {own['param_groups']} are not {other['param_groups']}")
    if list(own["state"]) != sorted(other["state"]):
        wrong.append(f"state of {list(own['state'])}, not {sorted(other['state'])}")
    for number in own["state"].keys() & other["state"].keys():
        names, expected = own["state"][number], other["state"][number]
        if names.keys() != expected.keys():
            wrong.append(f"{list(names)} of {number}, not {list(expected)}")
        wrong += [
            f"{name} of {number}"
            for name in names.keys() & expected.keys()
            if not same_value(names[name], expected[name])
        ]
    return wrong


def same_value(own: Any, other: Any) -> bool:
    """Return whether two entries of state have the same bits."""
    return (
        same_bits(own, other)
        if isinstance(other, torch.Tensor) and isinstance(own, torch.Tensor)
        else bool(own == other)
    )


def same_bits(own: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have equal values, shapes and dtypes; NaN equals NaN."""
    if own.dtype is not other.dtype or own.shape != other.shape:
        return False
    return (
        own.contiguous()
        .view(-1)
        .view(torch.uint8)
        .equal(other.contiguous().view(-1).view(torch.uint8))
    )
