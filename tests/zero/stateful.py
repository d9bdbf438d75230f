"""Sharded and whole optimizers with state; gradients depend on step and parameter alone."""

from __future__ import annotations

from typing import Any

import torch

from mpidist.zero.optimizer import OSS

SHAPES = [(5, 7), (64,), (3,), (2, 3, 4, 5), (130,), ()]
FROZEN = 2  # its place in SHAPES
ADAM = (torch.optim.Adam, {"lr": 0.01, "amsgrad": True})
SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
RPROP = (torch.optim.Rprop, {"lr": 0.1})


def parameters(frozen: bool = False) -> list[torch.nn.Parameter]:
    """Return parameters of odd sizes, one 0-dim, one in channels_last."""
    made = []
    for number, shape in enumerate(SHAPES):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        if len(shape) == 4:
            values = values.to(memory_format=torch.channels_last)
        made.append(torch.nn.Parameter(values, requires_grad=not (frozen and number == FROZEN)))
    return made


def groups(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Return two groups."""
    return [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.1}]


def named_groups(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Return two groups of named parameters."""
    named = [(f"layer.{number}", parameter) for number, parameter in enumerate(params)]
    return [{"params": named[:2]}, {"params": named[2:], "weight_decay": 0.1}]


def sharded(group, kind=ADAM, partition="greedy", frozen=False, names=False, **more) -> OSS:
    """Return a sharded optimizer over fresh parameters, in two groups."""
    optim, settings = kind
    params = parameters(frozen)
    return OSS(
        (named_groups if names else groups)(params),
        optim,
        group,
        partition=partition,
        **settings,
        **more,
    )


def whole(kind=ADAM, frozen=False, names=False) -> torch.optim.Optimizer:
    """Return the same optimizer unsharded."""
    optim, settings = kind
    params = parameters(frozen)
    return optim((named_groups if names else groups)(params), **settings)


def train(optimizer: torch.optim.Optimizer, steps, skipped=()) -> None:
    """Take steps, each by its own gradients; parameters whose numbers are skipped get none."""
    params = parameters_of(optimizer)
    for step in steps:
        for number, parameter in enumerate(params):
            parameter.grad = None
            if parameter.requires_grad and number not in skipped:
                generator = torch.Generator().manual_seed(1000 * step + number)
                parameter.grad = torch.empty_like(parameter).copy_(
                    torch.randn(parameter.shape, generator=generator)
                )
        optimizer.step()


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def same(one: Any, other: Any) -> bool:
    """Return whether nested values have equal bits, key orders and strides."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.stride() == other.stride()
            and torch.equal(one, other)
        )
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and list(one) == list(other)
            and all(same(one[key], other[key]) for key in one)
        )
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def same_run(one: torch.optim.Optimizer, other: torch.optim.Optimizer, steps) -> bool:
    """Take steps with both; return whether all parameters keep equal bits."""
    train(one, steps)
    train(other, steps)
    return all(map(torch.equal, parameters_of(one), parameters_of(other)))


def take_parameters(target: torch.optim.Optimizer, source: torch.optim.Optimizer) -> None:
    """Copy the parameters, as loading a model does."""
    with torch.no_grad():
        for one, other in zip(parameters_of(target), parameters_of(source), strict=True):
            one.copy_(other)
