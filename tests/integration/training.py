"""Small model with data, and its training in one process as the reference for parallel training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import torch
from torch import nn

from tests.tools.support import agree

STEPS, PART, FEATURES, TARGETS = 10, 6, 12, 5  # PART: rows of one rank's share of a batch


class Net(nn.Module):
    """Two layers and a side branch that a step may skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 17)
        self.side = nn.Linear(FEATURES, 17)
        self.last = nn.Linear(17, TARGETS)

    def forward(self, x: torch.Tensor, branch: bool = True) -> torch.Tensor:
        hidden = self.first(x)
        if branch:
            hidden = hidden + self.side(x)
        return self.last(torch.tanh(hidden))


def net() -> Net:
    """Return the float64 model with the same weights at every call."""
    torch.manual_seed(1)
    return Net().double()


def sgd(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def batch(step: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of all ranks; a rank's rows do not depend on the number of ranks."""
    source = torch.Generator().manual_seed(1000 + step)
    rows = [
        torch.randn(PART, FEATURES + TARGETS, dtype=torch.float64, generator=source)
        for _ in range(parts)
    ]
    together = torch.cat(rows)
    return together[:, :FEATURES], together[:, FEATURES:]


def share(step: int, rank: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one rank's rows of a batch."""
    x, y = batch(step, parts)
    return x[rank * PART : (rank + 1) * PART], y[rank * PART : (rank + 1) * PART]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def train(
    world,
    model: nn.Module,
    update: torch.optim.Optimizer,
    steps: Iterable[int] = range(STEPS),
) -> None:
    """Train on this rank's share of each batch."""
    for step in steps:
        update.zero_grad()
        x, y = share(step, world.rank, world.size)
        loss(model(x), y).backward()
        update.step()


def reference(
    parts: int,
    optimizer: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer] = sgd,
    branch: Callable[[int, int], bool] | None = None,
) -> Net:
    """Train in one process on whole batches; ``branch(step, part)`` selects the side branch."""
    model = net()
    update = optimizer(model.parameters())
    for step in range(STEPS):
        update.zero_grad()
        x, y = batch(step, parts)
        if branch is None:
            loss(model(x), y).backward()
        else:
            for part in range(parts):
                x, y = share(step, part, parts)
                (loss(model(x, branch(step, part)), y) / parts).backward()
        update.step()
    return model


def assert_trained(
    world, weights: Iterable[torch.Tensor], expected: nn.Module, tolerance: float = 1e-10
) -> None:
    """Require the same bits on every rank, and values within ``tolerance`` of the reference."""
    mine = torch.cat([w.detach().reshape(-1) for w in weights])
    wanted = torch.cat([w.detach().reshape(-1) for w in expected.parameters()])
    digests = world.all_gather_object(hashlib.sha256(mine.cpu().numpy().tobytes()).hexdigest())
    agree(world, len(set(digests)) == 1, f"weights differ between ranks: {digests}")
    far = (mine - wanted).abs().max().item()
    agree(world, far <= tolerance, f"weights differ from one process's by {far:g}")
