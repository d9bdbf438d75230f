"""Time calls by mpidist.rpc, by a floor over mpi4py and by torch's RPC over TensorPipe, in turns.

mpidist takes part twice: between workers that may exchange pickles, and between workers that read
data only.

mpirun --bind-to none -n 2 python benchmarks/bench_rpc.py
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from harness import benchmark_options, report, tables, timing
from harness.job import Job
from mpidist import progress_bar
from rpc import cases as rpc_cases
from rpc import goals as rpc_goals
from rpc import run as rpc_run
from rpc import workers as rpc_workers


def main() -> None:
    options = _arguments()
    settings = rpc_run.QUICK if options.quick else rpc_run.Settings()
    settings = replace(settings, blocks=options.blocks or settings.blocks)
    with Job() as job:
        group = job.group
        job.show()
        timing.touch_memory()
        cases = rpc_cases.chosen(
            rpc_cases.cases(settings.sizes_bytes, settings.burst, group.size - 1, settings.many),
            options.only,
        )
        if not cases:
            raise SystemExit(f"no case is named like {', '.join(options.only)}")
        names = [
            name for name in rpc_workers.modules() if options.tensorpipe or name != "tensorpipe"
        ]
        itself = job.mpi.COMM_SELF
        run = rpc_run.Run(itself, settings, cases, names, measures_threads=not options.only)
        blocks = [
            partial(rpc_run.floor_block, job.raw, run),
            *(partial(rpc_run.contender_block, name, group, run) for name in names),
        ]
        with progress_bar.bar("blocks", settings.blocks * len(blocks), group.rank) as advance:
            for number in range(settings.blocks):
                for place in range(len(blocks)):
                    blocks[(place + number) % len(blocks)]()
                    advance()
        if job.is_first:
            # A run that leaves something out does not replace the record of a whole run.
            is_part = bool(options.only) or not options.tensorpipe
            _report(run, job, options.output, ["part" * is_part])


def _report(run: rpc_run.Run, job: Job, folder: Path, parts: list[str]) -> None:
    """Print the tables and write the record."""
    results = [
        report.result_of(case.operation, case.size_bytes // 4, case.size_bytes, run.series_of(case))
        for case in run.cases
    ]
    report.print_by_operation(results)
    busy = {
        name: {key: float(np.median([one[key] for one in times])) for key in times[0]}
        for name, times in run.busy.items()
    }
    idle = {name: float(np.median(shares)) for name, shares in run.idle.items()}
    if busy:
        print(f"\n{_threads_table(busy, idle)}")
    verdicts = rpc_goals.verdicts_of(results, run.cases, busy.get("mpidist"), idle.get("mpidist"))
    fields = {
        "blocks": run.settings.blocks,
        "rounds": run.settings.rounds,
        "burst_s": run.settings.burst_s,
        "calls_in_async": run.settings.burst,
        "results": results,
        "callee_computes_in_python": busy,
        "idle_share_of_a_core": idle,
    }
    job.write(folder, "rpc", fields, verdicts, parts)


def _threads_table(busy: dict[str, dict[str, float]], idle: dict[str, float]) -> str:
    rows = [
        (name, values["median_ms"], values["p99_ms"], 100 * idle[name])
        for name, values in busy.items()
    ]
    headers = ("", "callee computes in Python:\nmedian, ms", "p99, ms", "idle worker:\n% of a core")
    return tables.text(rows, headers, floats=".2f")


def _arguments() -> argparse.Namespace:
    parser = benchmark_options.parser(__doc__, "quick")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="cases whose name contains one of these",
    )
    parser.add_argument(
        "--blocks", type=int, help="blocks of each contender; more for a noisy machine"
    )
    parser.add_argument(
        "--no-tensorpipe", dest="tensorpipe", action="store_false", help="leave TensorPipe out"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
