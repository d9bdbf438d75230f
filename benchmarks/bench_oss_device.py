"""Time steps of the sharded optimizer on a device.

mpirun --bind-to none -n 2 python benchmarks/bench_oss_device.py --device cuda
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from harness import benchmark_options, devices, report, timing
from harness.goals import judge_below
from harness.job import Job
from mpidist.optim import OSS
from optimizer import cases as oss_cases

# Contenders; those of OSS by its settings.
WHOLE, COPIES, TORCHS = "Adam", "copies of others' shards", "torch on mpidist"
WAYS: dict[str, dict[str, Any]] = {
    "mpidist": {},
    "mpidist flat": {"partition": "flat"},
    "mpidist flat bf16": {"partition": "flat", "wire": "bf16"},
}
# One rounding of a value of the wire, in parts of the largest parameter.
_WIRE_STEP = {"mpidist flat bf16": 2**-8}


@dataclass(frozen=True)
class Settings:
    """Networks, and repetitions of the measurements."""

    # Layers and width: 16.8 M and 100 M parameters.
    networks: tuple[tuple[int, int], ...] = ((64, 512), (24, 2048))
    rounds: int = 15
    burst_s: float = 0.02


QUICK = Settings(((4, 64),), 2, 0.001)


class Case:
    """Optimizers of one network, each on parameters of its own with the same gradients."""

    def __init__(self, group: Any, layers: int, width: int, device: torch.device) -> None:
        self.group, self.device = group, device
        self.make = lambda: oss_cases.with_gradients(oss_cases.mlp(layers, width)).to(device)
        self.modules: dict[str, torch.nn.Module] = {}
        self.optimizers: dict[str, Any] = {}
        adam, fused = torch.optim.Adam, {"fused": True, "lr": 1e-4}
        self._add(WHOLE, lambda p: adam(p, **fused))
        self._add(TORCHS, lambda p: ZeroRedundancyOptimizer(p, adam, **fused))
        for name, way in WAYS.items():
            self._add(name, lambda p, way=way: OSS(p, adam, group, **way, **fused))
        self.numel = sum(p.numel() for p in self.modules[WHOLE].parameters())

    def _add(self, name: str, build: Callable[[Any], Any]) -> None:
        module = self.modules[name] = self.make()
        for parameter in module.parameters():
            # Module.to replaces gradients with those of the new memory.
            assert parameter.grad is not None and parameter.grad.device == self.device
        self.optimizers[name] = build(module.parameters())

    def check(self) -> None:
        """Step each contender; compare parameters with Adam's. Collective.

        Raises:
            RuntimeError: Parameters differ by more than a rounding of the wire; on all ranks.
        """
        for optimizer in self.optimizers.values():
            for _ in range(2):
                optimizer.step()
        wanted = _flat(self.modules[WHOLE])
        for name, module in self.modules.items():
            bound = _WIRE_STEP.get(name, 1e-6) * float(wanted.abs().max())
            far = float((_flat(module) - wanted).abs().max())
            if max(self.group.all_gather_object(far)) > bound:
                raise RuntimeError(f"wrong parameters of {name}: off by {far}, allowed {bound}")

    def contenders(self) -> list[timing.Contender]:
        """Return a step of each optimizer, and one copy of the others' shards."""
        calls: dict[str, Callable[[], object]] = {
            name: optimizer.step for name, optimizer in self.optimizers.items()
        }
        others = self.numel - self.numel // self.group.size
        source, to = torch.randn(2, max(others, 1), device=self.device)
        calls[COPIES] = partial(to.copy_, source)
        return [
            timing.Contender(name, (devices.awaited(call, self.device),), ())
            for name, call in calls.items()
        ]


def _flat(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def measure(group: Any, raw: Any, settings: Settings, network: tuple[int, int], device: Any) -> Any:
    """Check and time one network. Collective.

    Returns:
        The JSON's entry, and the verdicts.
    """
    case = Case(group, *network, device)
    case.check()
    series = timing.time_rounds(raw, case.contenders(), settings.rounds, settings.burst_s)
    result = report.result_of("step", case.numel, 4 * case.numel, series)
    rounds = {one.name: np.array(one.rounds_us) for one in series}
    floor = rounds[WHOLE] / group.size + 2 * rounds[COPIES]
    over = {name: float(np.median(rounds[name] / floor)) for name in WAYS}
    result["over_floor"] = over
    title = f"{case.numel / 1e6:.3g} M parameters"
    verdicts = [
        judge_below(
            f"{title}: step of {name} over Adam / W + 2 copies of others' shards ≤ 1",
            over[name],
            1.0,
        )
        for name in ("mpidist", "mpidist flat")
    ]
    return result, verdicts


def main() -> None:
    options = benchmark_options.parser(__doc__, "device", "quick").parse_args()
    settings = QUICK if options.quick else Settings()
    device = devices.chosen(options.device)
    with Job(uses_torch=True, device=device) as job:
        timing.touch_memory()
        results, verdicts = [], []
        for network in settings.networks:
            result, judged = measure(job.group, job.raw, settings, network, device)
            results.append(result)
            verdicts += judged
            if job.is_first:
                print(report.table([result]), flush=True)
        if job.is_first:
            fields = {"rounds": settings.rounds, "burst_s": settings.burst_s, "results": results}
            parts = [devices.name_of(device)]
            job.write(options.output, "oss-device", fields, verdicts, parts)


if __name__ == "__main__":
    main()
