"""Compare calls by mpidist.rpc with calls by torch's RPC over TensorPipe, in one run, between the same processes, in turn.

mpirun --bind-to none -n 2 python benchmarks/bench_rpc.py
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import collective_goals
import environment
import numpy as np
import report
import timing
import torch
from collective_goals import Goal
from rpc_cases import Case, begin, cases, end_of_phase, follow_phases, modules, noop, processor_seconds
from tabulate import tabulate
from timing import Contender

import mpidist.comm
import mpidist.rpc

_KI, _MI = 1 << 10, 1 << 20


def _faster(operation: str, size: int, factor: float) -> Goal:
    what = f"{operation} of {collective_goals.format_bytes(size)}" if size else operation
    text = f"{what}: TensorPipe's time over ours ≥ {factor:g}"
    return Goal(text, operation, "tensorpipe", "mpidist", "ratio_of_medians", factor, True, lambda s: s == size)


GOALS = (
    _faster("no-op", 0, 8),
    _faster("echo", _KI, 10),
    _faster("echo", 4 * _MI, 1.5),
    _faster("async", 0, 4),
    _faster("remote + to_here", 0, 8),
)


@dataclass(frozen=True)
class Plan:
    """What to measure, and how long."""

    sizes_bytes: tuple[int, ...] = (_KI, 16 * _KI, 256 * _KI, 4 * _MI, 64 * _MI)
    burst: int = 2000
    rounds: int = 15
    burst_s: float = 0.05
    busy_s: float = 5.0  # for a callee that computes, and for one that idles


QUICK = Plan((_KI, 256 * _KI), 50, 2, 0.001, 0.2)


def main() -> None:
    options = _arguments()
    plan = QUICK if options.quick else Plan()
    torch.set_num_threads(1)
    group = mpidist.comm.init()
    if group.size < 2:
        raise SystemExit("start at least 2 ranks: mpirun --bind-to none -n 2 python benchmarks/bench_rpc.py")
    from mpi4py import MPI

    about = environment.describe(MPI.COMM_WORLD)
    timing.touch_memory()
    name = f"worker{group.rank}"
    _start_tensorpipe(group, name)
    mpidist.rpc.init_rpc(name)
    if group.rank == 0:
        try:
            _measure(MPI.COMM_SELF, plan, about, group.size, options.output)
        finally:
            for rank in range(1, group.size):
                mpidist.rpc.rpc_sync(rank, begin, args=("leave",))
    else:
        follow_phases()  # threads of TensorPipe and of ours answer meanwhile
    mpidist.rpc.shutdown()
    modules()["tensorpipe"].shutdown()


def _start_tensorpipe(group: Any, name: str) -> None:
    tensorpipe = modules()["tensorpipe"]
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(group.broadcast_object(_free_port() if group.rank == 0 else None))
    tensorpipe.init_rpc(name, rank=group.rank, world_size=group.size)


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _measure(comm: Any, plan: Plan, about: dict[str, Any], ranks: int, output: Path) -> None:
    print(
        f"{about['mpi_library']}, torch {about['torch']}, {ranks} ranks, {about['cpu']}; {environment.binding(about)}", flush=True
    )
    results = []
    for case in cases(plan.sizes_bytes, plan.burst, ranks - 1):
        results.append(_measured(case, comm, plan))
        print(report.table(results[-1:]), flush=True)
    busy = [_busy_callee(name, rpc, plan) for name, rpc in modules().items()]
    idle = _idle_share(plan)
    print(tabulate(busy, "keys", floatfmt=".3f"), f"\nan idle worker uses {100 * idle:.2f} % of a core", flush=True)
    verdicts = collective_goals.judge(results, GOALS)
    print(f"\n{report.goals_table(verdicts)}")
    record = {
        "benchmark": "rpc",
        "environment": about,
        "rounds": plan.rounds,
        "burst_s": plan.burst_s,
        "calls_in_async": plan.burst,
        "results_checked": True,  # or _measured() had raised
        "results": results,
        "callee_computes_in_python": busy,
        "idle_share_of_a_core": idle,
        "goals": verdicts,
    }
    path = output / f"rpc-{environment.library_name(about)}-{ranks}.json"
    report.write_json(record, path)
    print(f"\nwritten to {output.name}: {path.name}", flush=True)


def _measured(case: Case, comm: Any, plan: Plan) -> dict[str, Any]:
    ways = modules()
    wrong = [name for name, rpc in ways.items() if not case.is_right(rpc, "worker1")]
    if wrong:
        raise RuntimeError(f"{case.name} of {case.size_bytes} bytes: wrong result of {', '.join(wrong)}")
    contenders = [Contender(name, (partial(case.run, rpc, "worker1"),), ()) for name, rpc in ways.items()]
    series = timing.time_rounds(comm, contenders, plan.rounds, plan.burst_s)
    each = [timing.Series(s.name, s.passes_per_burst, case.calls, tuple(us / case.calls for us in s.rounds_us)) for s in series]
    return report.result_of(case.name, case.size_bytes // 4, case.size_bytes, each)


def _busy_callee(name: str, rpc: Any, plan: Plan) -> dict[str, Any]:
    """Time no-ops, one by one, while the callee's main thread computes in Python."""
    rpc.rpc_sync("worker1", begin, args=("compute",))
    times_ms = []
    end = time.perf_counter() + plan.busy_s
    while time.perf_counter() < end:
        start = time.perf_counter()
        rpc.rpc_sync("worker1", noop)
        times_ms.append(1e3 * (time.perf_counter() - start))
        time.sleep(1e-3)  # else the main thread would compute between two calls only
    rpc.rpc_sync("worker1", end_of_phase)
    median, p99 = np.percentile(times_ms, (50, 99))
    return {"callee computes in Python": name, "median_ms": float(median), "p99_ms": float(p99), "calls": len(times_ms)}


def _idle_share(plan: Plan) -> float:
    """Return which part of a core a worker uses that nobody calls; TensorPipe's idle threads are counted in."""
    rpc = modules()["mpidist"]
    before = rpc.rpc_sync("worker1", processor_seconds)
    time.sleep(plan.busy_s)
    return float(rpc.rpc_sync("worker1", processor_seconds) - before) / plan.busy_s


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON")
    parser.add_argument("--quick", action="store_true", help="see that it runs: few sizes, few rounds, figures of no worth")
    return parser.parse_args()


if __name__ == "__main__":
    main()
