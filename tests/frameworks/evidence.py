"""Model, single-process reference and report that the programs share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed import distributed_c10d as c10d

FEATURES, HIDDEN, CLASSES = 8, 16, 4
LOCAL_BATCH, STEPS_AN_EPOCH = 4, 3
LEARNING_RATE, MOMENTUM = 0.1, 0.9

groups: list[str] = []  # class of each of torch's groups in this process
_make = c10d._new_process_group_helper


def _noted(*args: Any, **kwargs: Any) -> Any:
    made = _make(*args, **kwargs)
    # "fake" is a backend of torch without communication, of torchtitan's groups of one rank.
    if made[0] is not c10d.GroupMember.NON_GROUP_MEMBER and str(args[3]) != "fake":
        groups.append(f"{type(made[0]).__module__}.{type(made[0]).__name__}")
    return made


c10d._new_process_group_helper = _noted


def model() -> nn.Module:
    """Return the same model on each call."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


def examples(ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and targets of one epoch: ``STEPS_AN_EPOCH`` batches of all ranks."""
    drawn = torch.Generator().manual_seed(2)
    count = ranks * LOCAL_BATCH * STEPS_AN_EPOCH
    return torch.randn(count, FEATURES, generator=drawn), torch.randn(
        count, CLASSES, generator=drawn
    )


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


def loss_of(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(module(inputs), targets)


def reference(ranks: int, epochs: int, batches_a_step: int = 1) -> nn.Module:
    """Return the model after plain SGD in one process on the batches of all ranks together."""
    inputs, targets = examples(ranks)
    trained, size = model(), ranks * LOCAL_BATCH * batches_a_step
    steps = optimizer(trained.parameters())
    for _ in range(epochs):
        for start in range(0, len(inputs), size):
            steps.zero_grad()
            loss_of(trained, inputs[start : start + size], targets[start : start + size]).backward()
            steps.step()
    return trained


def distance(module: nn.Module, other: nn.Module) -> float:
    """Return the greatest difference of two modules' parameters; of DTensors, as whole tensors."""
    pairs = zip(module.parameters(), other.parameters(), strict=True)
    return max(float((_whole(one) - _whole(two)).abs().max()) for one, two in pairs)


def report(rank: int, **facts: Any) -> None:
    """Print this rank's facts as one line of JSON, with the groups that torch made."""
    print("\n" + json.dumps({"rank": rank, "groups": groups, **facts}), flush=True)


def text_of_error(call: Callable[[], Any]) -> str:
    """Return the class and text of what ``call()`` raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()
