"""Time collectives of mpidist, Gloo and mpi4py in one run, in turns, on the same buffers.

mpirun --bind-to none -n 2 python benchmarks/bench_collectives.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

import mpidist.comm
from collectives.cases import FP32_BYTES, OPERATIONS, Ways, cases_of
from harness import bandwidth, benchmark_options, goals, report, timing
from harness.job import Job
from mpidist import progress_bar

_KI, _MI = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Settings:
    """Operations, sizes, and repetitions of the measurements."""

    operations: tuple[str, ...] = tuple(OPERATIONS)
    sizes_bytes: tuple[int, ...] = (
        8, 64, 512, 4 * _KI, 64 * _KI, 256 * _KI, 2 * _MI, 16 * _MI, 64 * _MI,
    )  # fmt: skip
    rounds: int = 15
    burst_s: float = 0.02


QUICK = Settings(sizes_bytes=(8, 64 * _KI), rounds=3, burst_s=0.002)


def main() -> None:
    options = _arguments()
    settings = _settings(options)
    with Job(uses_torch=True) as job:
        ways = Ways(dist.new_group(backend="gloo"), job.raw, job.group, job.mpi)
        job.show()
        timing.touch_memory()
        results = []
        for operation in settings.operations:
            rows = list(measure(operation, ways, settings))
            results += rows
            if job.is_first:
                report.print_by_operation(rows)
                if bus := bandwidth.bus_table(rows, job.group.size):
                    print(f"\n{operation}: bus bandwidth\n{bus}", flush=True)
        if job.is_first:
            fields = {"rounds": settings.rounds, "burst_s": settings.burst_s, "results": results}
            job.write(options.output, "collectives", fields, goals.judge(results))
        mpidist.comm.default().close()


def measure(operation: str, ways: Ways, settings: Settings) -> Iterator[dict[str, Any]]:
    """Check and time one operation at each size.

    Collective: over all ranks.

    Raises:
        RuntimeError: A contender's result is wrong; on all ranks.
    """
    cases = cases_of(operation, ways, settings.sizes_bytes)
    for make in progress_bar.track(cases, operation, ways.rank):
        case = make()
        wrong = case.wrong(ways)
        if wrong:
            raise RuntimeError(
                f"{operation} of {case.numel} elements: wrong result of {', '.join(wrong)}"
            )
        case.zero()
        series = timing.time_rounds(ways.raw, case.contenders, settings.rounds, settings.burst_s)
        yield report.result_of(operation, case.numel, case.size_bytes, series)


def parse_size(text: str) -> int:
    """Convert ``8``, ``64K`` or ``16M`` to bytes."""
    units = {"K": _KI, "M": _MI, "G": 1 << 30}
    number, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1)
    size = int(number) * unit
    if size < FP32_BYTES or size % FP32_BYTES:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of {FP32_BYTES} bytes")
    return size


def _arguments() -> argparse.Namespace:
    parser = benchmark_options.parser(__doc__, "quick")
    parser.add_argument(
        "--operations",
        nargs="+",
        choices=tuple(OPERATIONS),
        metavar="NAME",
        help=", ".join(OPERATIONS),
    )
    parser.add_argument(
        "--sizes", nargs="+", type=parse_size, metavar="BYTES", help="multiples of 4: 8 64K 16M"
    )
    parser.add_argument("--rounds", type=int, help=f"for each case; {Settings.rounds} if not given")
    return parser.parse_args()


def _settings(options: argparse.Namespace) -> Settings:
    basis = QUICK if options.quick else Settings()
    return Settings(
        tuple(options.operations or basis.operations),
        tuple(options.sizes or basis.sizes_bytes),
        options.rounds or basis.rounds,
        basis.burst_s,
    )


if __name__ == "__main__":
    main()
