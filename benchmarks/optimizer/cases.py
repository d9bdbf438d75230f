"""Sharded optimizers under test: models, process groups, and the check of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from mpidist.optim import OSS

try:
    from fairscale.optim import OSS as FairScaleOSS
except ImportError:
    FairScaleOSS = None

WAYS: dict[str, dict[str, Any]] = {
    "mpidist": {},
    "mpidist balanced": {"partition": "balanced"},
    "mpidist flat": {"partition": "flat"},
    "mpidist flat, one copy": {"partition": "flat", "one_copy": True},
}


class Peers:
    """Process groups of the contenders.

    Args:
        native: mpidist's group of all ranks.
    """

    def __init__(self, native: Any) -> None:
        self.native = native
        self.ours = dist.group.WORLD
        self.gloo = dist.new_group(backend="gloo")


def mlp(depth: int, width: int, bias: bool = True, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = [
        layer
        for _ in range(depth)
        for layer in (torch.nn.Linear(width, width, bias), torch.nn.GELU())
    ]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 10, bias))


def with_gradients(model: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator) * 1e-3
    return model


def optimizers(
    peers: Peers, make: Callable[[], torch.nn.Module], **settings: Any
) -> dict[str, Any]:
    """Build each contender on a model of its own."""
    adam = torch.optim.Adam
    built: dict[str, Any] = {"unsharded": adam(with_gradients(make()).parameters(), **settings)}
    if FairScaleOSS is not None:
        built["FairScale on Gloo"] = FairScaleOSS(
            with_gradients(make()).parameters(), adam, peers.gloo, **settings
        )
    for name, group in (("torch on Gloo", peers.gloo), ("torch on mpidist", peers.ours)):
        built[name] = ZeroRedundancyOptimizer(
            with_gradients(make()).parameters(),
            adam,
            process_group=group,
            parameters_as_bucket_view=True,
            **settings,
        )
    for name, way in WAYS.items():
        built[name] = OSS(
            with_gradients(make()).parameters(), adam, peers.native, **way, **settings
        )
    return built


def check(peers: Peers, built: dict[str, Any]) -> None:
    """Step all contenders once.

    Raises:
        RuntimeError: A result differs from the unsharded optimizer's, or mpidist's by one bit.
    """
    for optimizer in built.values():
        optimizer.step()
    expected = built["unsharded"].param_groups[0]["params"]
    for name, optimizer in built.items():
        found = optimizer.param_groups[0]["params"]
        is_right = all(
            torch.equal(a, b) if name.startswith("mpidist") else torch.allclose(a, b)
            for a, b in zip(found, expected, strict=True)
        )
        if not all(peers.native.all_gather_object(is_right)):
            raise RuntimeError(f"{name}: wrong parameters after a step")


def muons(peers: Peers, depth: int, width: int) -> dict[str, Any]:
    """Build Muon over matrices: each step computes matrix products, which sharding divides."""
    built: dict[str, Any] = {}
    for name, make in (
        ("unsharded", lambda parameters: torch.optim.Muon(parameters, lr=1e-3)),
        (
            "mpidist balanced",
            lambda parameters: OSS(
                parameters, torch.optim.Muon, peers.native, partition="balanced", lr=1e-3
            ),
        ),
    ):
        built[name] = make(with_gradients(mlp(depth, width, bias=False)).parameters())
    return built
