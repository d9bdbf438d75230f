"""Time start-up, shutdown, memory and all-to-all calls of mpidist.rpc, many ranks on few cores.

mpirun --oversubscribe -n 8 python benchmarks/bench_rpc_scale.py     # one job
python benchmarks/bench_rpc_scale.py --jobs 2 4 8 16 32              # one job after another
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mpidist.comm
from harness import benchmark_options, environment, plots, process_memory, report, tables
from rpc import workers as rpc_workers
from rpc.workers import noop
from scaling import jobs as scaling_jobs


def main() -> None:
    options = _arguments()
    if options.jobs:
        _run_jobs(options)
    else:
        _run_here(options)


# One job.


def _run_here(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    group = mpidist.comm.init()
    if group.size < 2:
        raise SystemExit("start at least 2 ranks, or name sizes of jobs: --jobs 2 4 8 16 32")
    from mpi4py import MPI

    about = environment.describe(MPI.COMM_WORLD)
    window_s = 0.05 if options.quick else options.window_s
    names = ["mpidist", *(["tensorpipe"] if options.tensorpipe else [])]
    measured = {name: _measure(name, group, window_s) for name in names}
    if group.rank:
        return
    _print([{"ranks": group.size, "contenders": measured}])
    path = options.output / f"rpc-scale-{environment.library_name(about)}-{group.size}.json"
    record = {
        "benchmark": "rpc-scale",
        "environment": about,
        "window_s": window_s,
        "contenders": measured,
    }
    report.write_json(record, path)
    print(f"\nwritten to {options.output.name}: {path.name}", flush=True)


def _measure(name: str, group: Any, window_s: float) -> dict[str, Any]:
    """Start a contender, call from all to all, and shut down. Return the figures of all ranks.

    Collective: over ``group``.
    """
    # The start is measured without imports.
    rpc_workers.modules()
    before = process_memory.resident_mib()
    group.barrier()
    start = time.perf_counter()
    rpc = rpc_workers.start(name, group)
    started_s = time.perf_counter() - start
    group.barrier()
    resident = process_memory.resident_mib() - before
    # Each rank begins with its neighbor, so that the first calls go to different ranks.
    others = [f"worker{(group.rank + step) % group.size}" for step in range(1, group.size)]
    # The first call of each pair sets up memory; the rate does not include this.
    _call_all(rpc, others)
    group.barrier()
    rounds_s = _for_a_while(lambda: _call_all(rpc, others), window_s)
    group.barrier()
    in_turn = itertools.cycle(others)
    calls_s = _for_a_while(lambda: rpc.rpc_sync(next(in_turn), noop), window_s)
    group.barrier()
    called = process_memory.resident_mib() - before
    start = time.perf_counter()
    rpc.shutdown()
    ended_s = time.perf_counter() - start
    group.barrier()
    own = started_s, ended_s, resident, called, rounds_s, calls_s
    starts, ends, residents, after_calls, rounds, calls = zip(
        *group.all_gather_object(own), strict=True
    )
    return {
        "start_s": max(starts),
        "shutdown_s": max(ends),
        "resident_mib": float(np.median(residents)),
        "resident_most_mib": max(residents),
        "resident_after_calls_mib": float(np.median(after_calls)),
        "async_calls_per_s": sum(len(others) * len(each) / sum(each) for each in rounds),
        "async_rounds_least": min(map(len, rounds)),
        "sync_calls_per_s": sum(len(each) / sum(each) for each in calls),
        "sync_median_ms": 1e3 * float(np.median(np.concatenate(calls))),
    }


def _call_all(rpc: Any, others: Sequence[str]) -> None:
    """Call every other worker once; all calls are pending at the same time."""
    for future in [rpc.rpc_async(other, noop) for other in others]:
        future.wait()


def _for_a_while(run: Callable[[], object], seconds: float) -> list[float]:
    """Run repeatedly for ``seconds``; return the duration of each run."""
    times_s = []
    now = time.perf_counter()
    end = now + seconds
    while now < end:
        start = now
        run()
        now = time.perf_counter()
        times_s.append(now - start)
    return times_s


# Jobs in sequence.


def _run_jobs(options: argparse.Namespace) -> None:
    records = []
    for ranks in options.jobs:
        with tempfile.TemporaryDirectory() as folder:
            passed = ["--output", folder, "--window-s", str(options.window_s)]
            passed += ["--tensorpipe"] * options.tensorpipe + ["--quick"] * options.quick
            command = [
                *scaling_jobs.start_of(options.launcher, ("--oversubscribe",)),
                "-n",
                str(ranks),
                sys.executable,
                __file__,
                *passed,
            ]
            status, _ = scaling_jobs.run_limited(command, {}, options.limit_s)
            written = list(Path(folder).glob("*.json"))
            if status == 0 and written:
                records.append(json.loads(written[0].read_text(encoding="utf-8")))
        if status is None:
            print(f"{ranks} ranks: not ended after {options.limit_s:g} s", flush=True)
        elif status:
            print(f"{ranks} ranks: ended with status {status}", flush=True)
    if not records:
        raise SystemExit("no job ended well")
    jobs = [{"ranks": record["environment"]["ranks"], **record} for record in records]
    _print(jobs)
    path = options.output / f"rpc-scale-{environment.library_name(jobs[0]['environment'])}.json"
    missed = [ranks for ranks in options.jobs if ranks not in [job["ranks"] for job in jobs]]
    report.write_json({"benchmark": "rpc-scale", "jobs": jobs, "jobs_without_result": missed}, path)
    print(f"\n{plots.beside(path)}", flush=True)
    if missed:
        raise SystemExit(1)


def _print(jobs: Sequence[dict[str, Any]]) -> None:
    headers = (
        "ranks", "", "start, s", "shutdown, s", "MiB a rank\n(most)", "… after\ncalls",
        "async calls\na second", "rpc_sync calls\na second", "median,\nms",
    )  # fmt: skip
    rows = [
        (
            job["ranks"],
            name,
            f"{values['start_s']:.3f}",
            f"{values['shutdown_s']:.3f}",
            f"{values['resident_mib']:.1f} ({values['resident_most_mib']:.1f})",
            f"{values['resident_after_calls_mib']:.1f}",
            f"{values['async_calls_per_s']:.0f}",
            f"{values['sync_calls_per_s']:.0f}",
            f"{values['sync_median_ms']:.3f}",
        )
        for job in jobs
        for name, values in job["contenders"].items()
    ]
    print(tables.text(rows, headers), flush=True)


def _arguments() -> argparse.Namespace:
    parser = benchmark_options.parser(__doc__, "quick")
    parser.add_argument(
        "--jobs",
        type=int,
        nargs="+",
        metavar="RANKS",
        help="start jobs of so many ranks, one after the other",
    )
    parser.add_argument("--limit-s", type=float, default=240.0, help="for each of them")
    parser.add_argument(
        "--launcher", help="their command up to -n; mpirun --oversubscribe if not given"
    )
    parser.add_argument(
        "--window-s", type=float, default=1.5, help="how long all call all, in each of the two ways"
    )
    parser.add_argument("--tensorpipe", action="store_true", help="measure TensorPipe, too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
