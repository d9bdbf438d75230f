"""Model with every kind of use of a parameter, its data, and its training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from mpidist.ddp.module import DistributedDataParallel

SETTINGS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Muon": (torch.optim.Muon, {"lr": 0.05, "weight_decay": 0.1}),
}


class Model(torch.nn.Module):
    """Model with foreign and tied weights, a channels_last kernel, and a weight of some steps only.

    Args:
        only_matrices: For Muon.
    """

    def __init__(self, only_matrices: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        has_bias = not only_matrices
        self.first = torch.nn.Linear(6, 16, bias=has_bias)
        self.foreign = torch.nn.Linear(16, 16, bias=False)
        self.attention = (
            None if only_matrices else torch.nn.MultiheadAttention(16, 2, batch_first=True)
        )
        self.conv = (
            None
            if only_matrices
            else torch.nn.Conv2d(1, 2, 3, padding=1).to(memory_format=torch.channels_last)
        )
        self.extra = torch.nn.Linear(16, 16, bias=False)
        self.last = torch.nn.Linear(16, 3, bias=has_bias)

    def forward(self, x: torch.Tensor, with_extra: bool = False) -> dict[str, torch.Tensor]:
        h = torch.tanh(self.first(x))
        h = torch.tanh(F.linear(h, self.foreign.weight)) + h @ self.foreign.weight.t()
        if self.attention is not None:
            h = h + self.attention(h[None], h[None], h[None], need_weights=False)[0][0]
        if self.conv is not None:
            h = h + self.conv(h.view(-1, 1, 4, 4)).sum(1).flatten(1)
        if with_extra:
            h = h + self.extra(h)
        return {"y": self.last(h), "h": h}


def backward(
    model: torch.nn.Module, rank: int, step: int, with_extra: bool = False, scale: float = 1.0
) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, target = torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)
    output = model(x, with_extra)
    (((output["y"] - target).square().mean() + output["h"].mean()) * scale).backward()


def wrapped(group: Any, kind: str, model: torch.nn.Module, **options: Any) -> Any:
    """Wrap a model in mpidist's module, or torch's on its default group; several buckets."""
    if kind == "torch":
        return TorchDDP(model, bucket_cap_mb=0.0005, **options)
    return DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.0005, **options)


def unequal_parameters(model: torch.nn.Module, expected: torch.nn.Module) -> str:
    """Return the names of parameters that differ."""
    pairs = zip(model.named_parameters(), expected.parameters(), strict=True)
    return ", ".join(name for (name, one), other in pairs if not torch.equal(one, other))


def trained(
    group: Any,
    ddp: Any,
    optimizer: Any,
    steps: Sequence[int],
    steps_itself: bool = False,
    *,
    schedules: bool = False,
) -> None:
    """Train; some passes only accumulate, some leave a parameter unused on some or all ranks."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if schedules else None
    for number in steps:
        optimizer.zero_grad(set_to_none=bool(number % 2))
        if number % 3 == 1:
            with ddp.no_sync():
                backward(ddp, group.rank, number + 50)
        backward(ddp, group.rank, number, with_extra=number > 1 and (number + group.rank) % 2 == 0)
        if not steps_itself:
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
