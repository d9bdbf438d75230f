"""Models for data-parallel training, and steps of forward and backward passes on random batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from harness import devices
from harness.timing import Contender
from mpidist.ddp import DistributedDataParallel

Tensor = torch.Tensor
MANY_LAYERS = 120  # of the network of many tensors


@dataclass(frozen=True)
class Model:
    """Network and batch of one rank."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Tensor]

    def numel(self) -> int:
        """Return the number of parameters."""
        return sum(p.numel() for p in self.build().parameters())

    def on(self, device: torch.device) -> Model:
        """Return the model on a device; its random numbers are those of the host."""
        return replace(
            self, build=lambda: self.build().to(device), batch=lambda: self.batch().to(device)
        )


def mlp(batch: int) -> Model:
    """Return an MLP: 8.4 million parameters in 8 layers of 1024."""

    def build() -> nn.Module:
        layers = [part for _ in range(8) for part in (nn.Linear(1024, 1024), nn.ReLU())]
        return nn.Sequential(*layers)

    return Model(f"MLP 8.4 M, batch {batch}", build, lambda: torch.randn(batch, 1024))


def many(batch: int) -> Model:
    """Return a network of two tensors a layer: 2 million parameters in 120 layers of 128."""

    def build() -> nn.Module:
        layers = [part for _ in range(MANY_LAYERS) for part in (nn.Linear(128, 128), nn.ReLU())]
        return nn.Sequential(*layers)

    return Model(
        f"{2 * MANY_LAYERS} tensors, batch {batch}", build, lambda: torch.randn(batch, 128)
    )


class _Block(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside), nn.ReLU(),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside),
        )  # fmt: skip
        is_same = inside == outside and stride == 1
        self.short = (
            nn.Identity()
            if is_same
            else nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False))
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.short(x))


def resnet18(batch: int) -> Model:
    """Return a network with ResNet-18's shapes for images of 32 × 32: 11 million parameters."""

    def build() -> nn.Module:
        layers: list[nn.Module] = [
            nn.Conv2d(3, 64, 3, 1, 1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
        ]
        inside = 64
        for outside, stride in (
            (64, 1),
            (64, 1),
            (128, 2),
            (128, 1),
            (256, 2),
            (256, 1),
            (512, 2),
            (512, 1),
        ):
            layers.append(_Block(inside, outside, stride))
            inside = outside
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))

    return Model(f"ResNet-18, batch {batch}", build, lambda: torch.randn(batch, 3, 32, 32))


def transformer(batch: int) -> Model:
    """Return four encoder layers of width 256: 3 million parameters, sequences of 64."""

    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    return Model(f"transformer 3.2 M, batch {batch}", build, lambda: torch.randn(batch, 64, 256))


MODELS = {"mlp": mlp, "many": many, "resnet18": resnet18, "transformer": transformer}


def contender(name: str, net: nn.Module, batch: Tensor, set_to_none: bool = True) -> Contender:
    """Return a module's forward and backward pass as a contender; the gradients are its outputs."""

    def step() -> None:
        net.zero_grad(set_to_none=set_to_none)
        net(batch).square().mean().backward()
        devices.synchronize(batch.device)

    step()
    # DDP rebuilds its buckets after the first step.
    step()
    return Contender(name, (step,), tuple(p.grad for p in net.parameters() if p.grad is not None))


def build(model: Model, seed: int = 0) -> nn.Module:
    """Return the model with equal weights on all ranks."""
    torch.manual_seed(seed)
    return model.build()


def own_batch(model: Model) -> Tensor:
    """Return this rank's batch."""
    torch.manual_seed(100 + dist.get_rank())
    return model.batch()


def ours(model: Model, state: Any = None, hook: Any = None, **options: Any) -> nn.Module:
    """Return the model in mpidist's DDP."""
    net = DistributedDataParallel(build(model), **options)
    if hook is not None:
        net.register_comm_hook(state, hook)
    return net


def theirs(
    model: Model, group: Any, state: Any = None, hook: Any = None, **options: Any
) -> nn.Module:
    """Return the model in torch's DDP, with gradients as views, which is faster there."""
    net = TorchDDP(build(model), process_group=group, gradient_as_bucket_view=True, **options)
    if hook is not None:
        net.register_comm_hook(state, hook)
    return net


def farthest(left: Contender, right: Contender) -> float:
    """Return the largest difference of gradients, relative to the largest gradient."""
    pairs = zip(left.outputs, right.outputs, strict=True)
    largest = max(float(t.abs().max()) for t in right.outputs)
    return max(float((a - b).abs().max()) for a, b in pairs) / largest
