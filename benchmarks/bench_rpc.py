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
from typing import Any

import numpy as np
import torch

import mpidist.comm
import mpidist.rpc
from harness import benchmark_options, environment, plots, report, tables, timing
from mpidist import progress_bar
from rpc import cases as rpc_cases
from rpc import goals as rpc_goals
from rpc import run as rpc_run
from rpc import workers as rpc_workers


def main() -> None:
    options = _arguments()
    settings = rpc_run.QUICK if options.quick else rpc_run.Settings()
    settings = replace(settings, blocks=options.blocks or settings.blocks)
    torch.set_num_threads(1)
    group = mpidist.comm.init()
    benchmark_options.require_two_ranks(group.size)
    from mpi4py import MPI

    about = environment.describe(MPI.COMM_WORLD)
    if group.rank == 0:
        print(f"{about['mpi_library']}, torch {about['torch']}, {group.size} ranks, {about['cpu']}")
        print(environment.binding(about), flush=True)
    timing.touch_memory()
    cases = rpc_cases.chosen(
        rpc_cases.cases(settings.sizes_bytes, settings.burst, group.size - 1, settings.many),
        options.only,
    )
    if not cases:
        raise SystemExit(f"no case is named like {', '.join(options.only)}")
    names = [name for name in rpc_workers.modules() if options.tensorpipe or name != "tensorpipe"]
    run = rpc_run.Run(MPI.COMM_SELF, settings, cases, names, measures_threads=not options.only)
    blocks = [
        partial(rpc_run.floor_block, MPI.COMM_WORLD, run),
        *(partial(rpc_run.contender_block, name, group, run) for name in names),
    ]
    with progress_bar.bar("blocks", settings.blocks * len(blocks), group.rank) as advance:
        for number in range(settings.blocks):
            for place in range(len(blocks)):
                blocks[(place + number) % len(blocks)]()
                advance()
    if group.rank == 0:
        # A run that leaves something out does not replace the record of a whole run.
        suffix = "-part" if options.only or not options.tensorpipe else ""
        name = f"rpc-{environment.library_name(about)}-{group.size}{suffix}.json"
        _report(run, about, options.output / name)


def _report(run: rpc_run.Run, about: dict[str, Any], path: Path) -> None:
    """Print the tables and write the record."""
    results = [
        report.result_of(case.operation, case.size_bytes // 4, case.size_bytes, run.series_of(case))
        for case in run.cases
    ]
    for name in dict.fromkeys(result["operation"] for result in results):
        of_name = [result for result in results if result["operation"] == name]
        print(f"\n{name}\n{report.table(of_name)}")
    busy = {
        name: {key: float(np.median([one[key] for one in times])) for key in times[0]}
        for name, times in run.busy.items()
    }
    idle = {name: float(np.median(shares)) for name, shares in run.idle.items()}
    if busy:
        print(f"\n{_threads_table(busy, idle)}")
    verdicts = rpc_goals.verdicts_of(results, run.cases, busy.get("mpidist"), idle.get("mpidist"))
    print(f"\n{report.goals_table(verdicts)}")
    record = {
        "benchmark": "rpc",
        "environment": about,
        "blocks": run.settings.blocks,
        "rounds": run.settings.rounds,
        "burst_s": run.settings.burst_s,
        "calls_in_async": run.settings.burst,
        # A wrong result ends the run with an error before this line.
        "results_checked": True,
        "results": results,
        "callee_computes_in_python": busy,
        "idle_share_of_a_core": idle,
        "goals": verdicts,
    }
    report.write_json(record, path)
    print(f"\n{plots.beside(path)}", flush=True)


def _threads_table(busy: dict[str, dict[str, float]], idle: dict[str, float]) -> str:
    rows = [
        (name, values["median_ms"], values["p99_ms"], 100 * idle[name])
        for name, values in busy.items()
    ]
    headers = ("", "callee computes in Python:\nmedian, ms", "p99, ms", "idle worker:\n% of a core")
    return tables.text(rows, headers, floats=".2f")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    benchmark_options.add_output(parser)
    benchmark_options.add_quick(parser)
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
