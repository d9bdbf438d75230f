"""Small run with all kinds of state: random numbers, momenta, buffers, position, schedule."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDataParallel
from torch.utils.data import DataLoader, TensorDataset

from mpidist.checkpoint import ResumableSampler, dtensors
from mpidist.ddp import DistributedDataParallel, PowerSGDState, powerSGD_hook
from mpidist.optim import OSS

SAMPLES = 22


class Running(torch.nn.Module):
    """Layer that subtracts a running mean, a buffer; works with a batch of one sample."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean


def net(width: int = 12) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(6, width),
        Running(width),
        torch.nn.Tanh(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(width, 3),
    )


class Run:
    """Objects of a run on one rank.

    Args:
        kind: ``adam``; ``oss`` and a partition; ``powersgd``; ``torch`` for torch's data
            parallelism; ``fsdp`` for torch's sharded parameters; ``own`` for buffers that stay each
            rank's own.
        seed: Of weights and generators, which a load must make irrelevant.
    """

    def __init__(
        self,
        group: Any,
        kind: str,
        seed: int = 0,
        width: int = 12,
        samples: int = SAMPLES,
        base: Any = None,
    ) -> None:
        torch.manual_seed(seed)
        inner = net(width)
        torch.manual_seed(100 * seed + group.rank)
        self.hook_state = (
            PowerSGDState(group, 2, start_powerSGD_iter=1, min_compression_rate=1)
            if kind == "powersgd"
            else None
        )
        if kind == "torch":
            self.model: Any = TorchDataParallel(inner)
        elif kind == "fsdp":
            self.model = fully_shard(inner, mesh=init_device_mesh("cpu", (group.size,)))
        else:
            more = {"forward_sync_buffers": False} if kind == "own" else {}
            self.model = DistributedDataParallel(
                inner, process_group=group, bucket_cap_mb=0.0003, **more
            )
        if self.hook_state is not None:
            self.model.register_comm_hook(self.hook_state, powerSGD_hook)
        base = base or torch.optim.Adam
        partition = kind.removeprefix("oss-")
        settings = {"lr": 0.05} if partition == kind else {"lr": 0.05, "partition": partition}
        self.optimizer = (
            base(inner.parameters(), **settings)
            if partition == kind
            else OSS(inner.parameters(), base, group, **settings)
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(
            torch.randn(samples, 6, generator=generator),
            torch.randn(samples, 3, generator=generator),
        )
        self.sampler = ResumableSampler(data, group=group, seed=3)
        self.loader = DataLoader(data, 2, sampler=self.sampler, generator=torch.Generator())
        self.step = 0

    def state(self) -> dict[str, Any]:
        names = ("model", "optimizer", "hook_state", "scheduler", "sampler")
        return {name: getattr(self, name) for name in names}

    def train(self, steps: int) -> list[float]:
        """Train a number of steps; return the losses."""
        losses: list[float] = []
        while len(losses) < steps:
            if not len(self.sampler):
                self.sampler.set_epoch(self.sampler.epoch + 1)
            for x, y in self.loader:
                self.optimizer.zero_grad()
                loss = (self.model(x) - y).square().mean()
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                self.sampler.advance(len(x))
                self.step += 1
                losses.append(loss.item())
                if len(losses) == steps:
                    break
        return losses

    def tensors(self) -> list[torch.Tensor]:
        values = getattr(self.model, "module", self.model).state_dict().values()
        return [value.to_local() if isinstance(value, DTensor) else value for value in values]

    def moments(self) -> dict[str, Any]:
        """Return the whole optimizer's state. Collective."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if isinstance(self.optimizer, OSS):
                return self.optimizer.state_dict(all_ranks=True)
            return dtensors.content({}, self.optimizer)[1]["optimizer"] or {}
