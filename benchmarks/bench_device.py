"""Time transfers of device tensors: device pointers, mpidist's ring, and staging through the host.

mpirun --bind-to none -n 2 python benchmarks/bench_device.py --device cuda
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from collectives.device_cases import Place, all_reduce, is_back, is_sum, ping_pong
from harness import benchmark_options, devices, report, timing
from harness.goals import Goal, judge
from harness.job import Job
from harness.timing import Contender
from mpidist.comm.discovery import capability
from mpidist.comm.memory.stream import HostDevice, device_of
from mpidist.comm.messages.message_pieces import PieceTransfers
from mpidist.comm.mpi import runtime
from mpidist.comm.mpi.communicator import Communicator

_KI, _MI = 1 << 10, 1 << 20


def _ahead(operation: str, name: str) -> Goal:
    text = f"{operation} from 1 MiB: time of staged over {name} ≥ 1"
    return Goal(
        text, operation, "staged", name, "ratio_of_rounds", 1.0, True, lambda size: size >= _MI
    )


GOALS = (
    _ahead("ping_pong", "library"),
    _ahead("all_reduce", "library"),
    _ahead("all_reduce", "ring"),
)


@dataclass(frozen=True)
class Settings:
    """Sizes, and repetitions of the measurements."""

    sizes_bytes: tuple[int, ...] = tuple(4 * _KI << 2 * power for power in range(8))
    rounds: int = 11
    burst_s: float = 0.01


# The last one by several chunks, each way.
QUICK = Settings((4 * _KI, 1 * _MI, 12 * _MI), 2, 0.001)


_OPERATIONS: dict[
    str, tuple[Callable[[Place, int], list[Contender]], Callable[[Place, Contender], bool]]
] = {
    "all_reduce": (all_reduce, is_sum),
    "ping_pong": (ping_pong, is_back),
}


def main() -> None:
    options = benchmark_options.parser(__doc__, "device", "quick").parse_args()
    settings = QUICK if options.quick else Settings()
    device = devices.chosen(options.device)
    if options.device == "cpu":
        # Any MPI accepts host memory in all operations.
        os.environ["MPIDIST_CUDA_AWARE"] = "1"
    with Job(device=device) as job:
        world = runtime.world()
        place = _place(Communicator(job.raw, world.nodes, world.highest_tag).blocking(), device)
        capabilities = capability.capabilities()
        job.show()
        if job.is_first:
            print(f"CUDA-aware: {capabilities.cuda_aware} ({capabilities.cuda_source})")
        results = []
        for operation in _OPERATIONS:
            rows = list(measure(operation, place, settings))
            results += rows
            if job.is_first:
                report.print_by_operation(rows)
        if job.is_first:
            _write(options.output, job, settings, place, capabilities, results)


def _place(comm: Communicator, device: torch.device) -> Place:
    queues = device_of((torch.empty(0, device=device),)) or HostDevice()
    able = capability.agreed_operations(comm, device)
    return Place(comm, device, queues, able, PieceTransfers(comm, comm.mpi))


def measure(operation: str, place: Place, settings: Settings) -> Iterator[dict[str, Any]]:
    """Check and time one operation at each size.

    Collective: over all ranks.

    Raises:
        RuntimeError: A contender's result is wrong; on all ranks.
    """
    make, is_right = _OPERATIONS[operation]
    raw = place.comm.mpi
    for size_bytes in settings.sizes_bytes:
        contenders = make(place, size_bytes // 4)
        for contender in contenders:
            wrong = [
                rank
                for rank, right in enumerate(raw.allgather(is_right(place, contender)))
                if not right
            ]
            if wrong:
                raise RuntimeError(
                    f"{operation} of {size_bytes} bytes by {contender.name}: wrong result on ranks "
                    f"{wrong}"
                )
        for contender in contenders:
            # Repeated sums in place would overflow.
            contender.outputs[0].zero_()
        series = timing.time_rounds(raw, contenders, settings.rounds, settings.burst_s)
        yield report.result_of(operation, size_bytes // 4, size_bytes, series)


def _write(
    folder: Path,
    job: Job,
    settings: Settings,
    place: Place,
    capabilities: capability.Capabilities,
    results: list[dict[str, Any]],
) -> None:
    operations = dict(capabilities.operations)
    print("\noperations on this device's memory:")
    print("\n".join(f"  {name}: {words}" for name, words in operations.items()))
    fields = {
        "rounds": settings.rounds,
        "burst_s": settings.burst_s,
        "cuda_aware": capabilities.cuda_aware,
        "cuda_source": capabilities.cuda_source,
        # Per operation, whether MPI accepts device memory, and why not.
        "operations": operations,
        "results": results,
    }
    parts = [devices.name_of(place.device), "" if place.able else "staged"]
    job.write(folder, "device", fields, judge(results, GOALS), parts)


if __name__ == "__main__":
    main()
