"""Time kernels, torch and device copies: pack, unpack, accumulate, local PowerSGD.

python benchmarks/bench_kernels.py --device cuda    (one process; needs an MPI library, no launcher)
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from cuda_kernels import cases as kernel_cases
from cuda_kernels import goals as kernel_goals
from cuda_kernels import powersgd_cases
from cuda_kernels import report as kernel_report
from harness import benchmark_options, devices, environment, plots, report, timing
from mpidist import progress_bar
from training.gradient_lists import LISTS, cut

_MI = 1 << 20


@dataclass(frozen=True)
class Settings:
    """Sizes, networks, and repetitions of the measurements."""

    copied_lists: tuple[str, ...] = ("ResNet-50", "GPT-2")
    sizes_bytes: tuple[int, ...] = (1 * _MI, 4 * _MI, 16 * _MI, 64 * _MI, 256 * _MI)
    # The cases of the goals come first, in case the time runs out.
    powersgd: tuple[tuple[str, int], ...] = tuple(
        (name, rank) for rank in (4, 1, 2, 8) for name in ("ResNet-50", "GPT-2", "BERT-large")
    )
    # Elements of a list that PowerSGD compresses; None for all.
    most_numel: int | None = None
    bucket_bytes: int = 25 * _MI
    rounds: int = 9
    # GPU time. The host needs many times as long to start the work.
    burst_s: float = 0.0003


QUICK = Settings(
    ("ResNet-50",), (_MI,), (("ResNet-50", 4), ("ResNet-50", 1)), _MI // 2, _MI, 2, 0.0005
)


@dataclass
class Run:
    """Settings and results that the cases share."""

    settings: Settings
    device: torch.device
    # In seconds of time.monotonic(); no case begins later.
    deadline: float
    # mpi4py communicator of this process alone.
    alone: Any
    left_out: list[str]

    def has_time_for(self, what: str) -> bool:
        """Return whether a case may begin; record it if not."""
        if time.monotonic() < self.deadline:
            return True
        self.left_out.append(what)
        return False

    def times(
        self, contenders: list[timing.Contender], run_burst: timing.RunBurst | None
    ) -> dict[str, timing.Series]:
        """Time contenders in turn; return their series by name."""
        series = timing.time_rounds(
            self.alone, contenders, self.settings.rounds, self.settings.burst_s, run_burst
        )
        return {one.name: one for one in series}


def main() -> None:
    options = _arguments()
    settings = _settings(options)
    torch.set_num_threads(1)
    device = devices.chosen(options.device)
    dist.init_process_group("mpidist")
    # mpidist prepares the MPI library before the import of mpi4py.MPI starts MPI.
    from mpi4py import MPI

    if dist.get_world_size() > 1:
        raise SystemExit("start one process: the launches of several would share the device")
    about = environment.describe(MPI.COMM_SELF, device)
    print(f"{environment.processor(about)}, torch {about['torch']}", flush=True)
    run = Run(settings, device, time.monotonic() + options.limit_s, MPI.COMM_SELF, [])
    copied = list(_printed(copies(run), kernel_report.copy_row))
    compressed = list(
        _printed(compressions(run, kernel_report.memory_rate(copied)), kernel_report.powersgd_row)
    )
    verdicts = kernel_goals.judge(copied, compressed)
    print(f"\n{kernel_goals.goals_table(verdicts)}", flush=True)
    record = {
        "benchmark": "kernels",
        "environment": about,
        "rounds": settings.rounds,
        "burst_s": settings.burst_s,
        "bucket_bytes": settings.bucket_bytes,
        # A wrong result ends the run with an error before this line.
        "results_checked": True,
        "left_out_for_time": run.left_out,
        "copies": copied,
        "powersgd": compressed,
        "goals": verdicts,
    }
    path = options.output / f"kernels-{devices.name_of(device)}.json"
    report.write_json(record, path)
    print(f"\n{plots.beside(path)}", flush=True)
    dist.destroy_process_group()


def copies(run: Run) -> Iterator[dict[str, Any]]:
    """Check and time copies of tensors.

    Raises:
        RuntimeError: A contender's result is wrong.
    """
    lists, sizes = run.settings.copied_lists, run.settings.sizes_bytes
    for case in (
        case
        for size in progress_bar.track(sizes, "copies", 0)
        for case in kernel_cases.cases(lists, [size], run.device)
    ):
        what = f"{case.operation} of {case.tensors_of}, {case.dtypes}, {case.size_bytes} bytes"
        if not run.has_time_for(what):
            continue
        wrong = case.wrong()
        if wrong:
            raise RuntimeError(f"{what}: wrong result of {', '.join(wrong)}")
        issued, clock = (
            run.times(case.contenders, devices.as_issued(run.device)),
            devices.HeadStart(run.device),
        )
        alone = run.times(case.contenders, clock) if run.device.type == "cuda" else issued
        yield kernel_report.copy_result(case, issued, alone, clock.behind)


def compressions(run: Run, copy_rate: float | None) -> Iterator[dict[str, Any]]:
    """Check and time PowerSGD.

    Raises:
        RuntimeError: A contender's result is wrong.
    """
    for name, rank in progress_bar.track(run.settings.powersgd, "PowerSGD", 0):
        if not run.has_time_for(f"PowerSGD of {name} at rank {rank}"):
            continue
        shapes = LISTS[name]()
        if run.settings.most_numel is not None:
            shapes = cut(shapes, run.settings.most_numel)
        case = powersgd_cases.case(name, shapes, run.settings.bucket_bytes, rank, run.device)
        issued = run.times(case.contenders, devices.as_issued(run.device))
        alone = None
        # Hooks wait for the device, so that HeadStart would measure nothing of them.
        if run.device.type == "cuda":
            alone = run.times(case.contenders[:1], devices.HeadStart(run.device))[
                powersgd_cases.KERNELS
            ]
        yield kernel_report.powersgd_result(case, issued, alone, copy_rate)


def _printed(
    results: Iterator[dict[str, Any]], row: Callable[[dict[str, Any]], str]
) -> Iterator[dict[str, Any]]:
    # Each row is written at once, so that an interrupted run keeps its results.
    for result in results:
        print(row(result), flush=True)
        yield result


def _arguments() -> argparse.Namespace:
    parser = benchmark_options.parser(__doc__, "quick")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="on the CPU the kernels' torch twins work",
    )
    parser.add_argument("--rounds", type=int, help=f"for each case; {Settings.rounds} if not given")
    parser.add_argument(
        "--limit-s", type=float, default=float("inf"), help="begin no case after so many seconds"
    )
    return parser.parse_args()


def _settings(options: argparse.Namespace) -> Settings:
    basis = QUICK if options.quick else Settings()
    return basis if options.rounds is None else dataclasses.replace(basis, rounds=options.rounds)


if __name__ == "__main__":
    main()
