"""Time the echo of a device's tensor by mpidist.rpc, and by torch's RPC over TensorPipe, in turns.

TensorPipe passes the device's memory between processes by CUDA IPC.

mpirun --bind-to none -n 2 python benchmarks/bench_rpc_device.py --device cuda
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from harness import benchmark_options, devices, report, timing
from harness.goals import Goal, judge
from harness.job import Job
from rpc import workers as rpc_workers

_KI, _MI = 1 << 10, 1 << 20
_NAMES = ("mpidist", "tensorpipe")


def _ahead(text: str, factor: float, covers: Callable[[int], bool]) -> Goal:
    return Goal(
        f"echo {text}: TensorPipe's time over ours ≥ {factor:g}",
        "echo", "tensorpipe", "mpidist", "ratio_of_medians", factor, True, covers,
    )  # fmt: skip


GOALS = (
    _ahead("from 1 MiB", 1.0, lambda size: size >= _MI),
    _ahead("of 4 KiB", 2.0, lambda size: size == 4 * _KI),
)


@dataclass(frozen=True)
class Settings:
    """Sizes, and repetitions of the measurements."""

    sizes_bytes: tuple[int, ...] = (4 * _KI, 64 * _KI, _MI, 16 * _MI, 64 * _MI)
    blocks: int = 4  # of each contender, in turns
    rounds: int = 5  # per block
    burst_s: float = 0.02


QUICK = Settings((4 * _KI, _MI), 1, 2, 0.001)


@dataclass
class Run:
    """Series by size and contender, as measured on rank 0."""

    group: Any
    alone: Any  # mpi4py communicator of this process
    settings: Settings
    device: torch.device
    device_map: dict[str, dict[Any, Any]] | None
    series: dict[tuple[int, str], list[timing.Series]]

    def block(self, name: str) -> None:
        """Start a contender, check and time all sizes, and shut it down. Collective.

        Raises:
            RuntimeError: A call returned a wrong result.
        """
        rpc = rpc_workers.start(name, self.group, self.device_map)
        if self.group.rank == 0:
            for size in self.settings.sizes_bytes:
                self._measure(name, rpc, size)
        rpc_workers.end(name, self.group)

    def _measure(self, name: str, rpc: Any, size: int) -> None:
        sent = torch.arange(size // 4, device=self.device, dtype=torch.float32)

        def call() -> torch.Tensor:
            found: torch.Tensor = rpc.rpc_sync("worker1", rpc_workers.echo, args=(sent,))
            return found

        found = call()
        if found.device != sent.device or not torch.equal(found, sent):
            raise RuntimeError(f"echo of {size} bytes: wrong result of {name} on {found.device}")
        contender = timing.Contender(name, (devices.awaited(call, self.device),), ())
        self.series.setdefault((size, name), []).extend(
            timing.time_rounds(self.alone, [contender], self.settings.rounds, self.settings.burst_s)
        )

    def results(self) -> list[dict[str, Any]]:
        """Return the JSON's entries: all blocks of a contender as one series."""
        found = []
        for size in self.settings.sizes_bytes:
            joined = [
                replace(blocks[0], rounds_us=tuple(us for one in blocks for us in one.rounds_us))
                for name in _NAMES
                if (blocks := self.series.get((size, name)))
            ]
            found.append(report.result_of("echo", size // 4, size, joined))
        return found


def main() -> None:
    options = benchmark_options.parser(__doc__, "device", "quick").parse_args()
    settings = QUICK if options.quick else Settings()
    device = devices.chosen(options.device)
    with Job(device=device) as job:
        group, itself = job.group, job.mpi.COMM_SELF
        # Before the first message of a device, messages go over the host where ranks share one.
        group.all_reduce(torch.ones(1, device=device))
        every = group.all_gather_object(device)
        maps = {f"worker{rank}": {device: there} for rank, there in enumerate(every)}
        run = Run(group, itself, settings, device, maps if device.type == "cuda" else None, {})
        for number in range(settings.blocks):
            for place in range(len(_NAMES)):
                run.block(_NAMES[(place + number) % len(_NAMES)])
        job.show()
        if job.is_first:
            results = run.results()
            print(report.table(results))
            fields = {
                "blocks": settings.blocks,
                "rounds": settings.rounds,
                "burst_s": settings.burst_s,
                "results": results,
            }
            parts = [devices.name_of(device)]
            job.write(options.output, "rpc-device", fields, judge(results, GOALS), parts)


if __name__ == "__main__":
    main()
