"""Compare calls by mpidist.rpc with calls by torch's RPC over TensorPipe, in one run, between the same processes, in turns.

mpirun --bind-to none -n 2 python benchmarks/bench_rpc.py
"""

from __future__ import annotations

import argparse
import tempfile
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
    blocks: int = 5  # how often the contenders take turns
    rounds: int = 5
    burst_s: float = 0.05
    busy_s: float = 1.5  # for a callee that computes, and for one that idles


QUICK = Plan((_KI, 256 * _KI), 50, 1, 2, 0.001, 0.2)


def main() -> None:
    options = _arguments()
    plan = QUICK if options.quick else Plan()
    torch.set_num_threads(1)
    group = mpidist.comm.init()
    if group.size < 2:
        raise SystemExit("start at least 2 ranks: mpirun --bind-to none -n 2 python benchmarks/bench_rpc.py")
    from mpi4py import MPI

    about = environment.describe(MPI.COMM_WORLD)
    if group.rank == 0:
        print(f"{about['mpi_library']}, torch {about['torch']}, {group.size} ranks, {about['cpu']}")
        print(environment.binding(about), flush=True)
    timing.touch_memory()
    run = Run(MPI.COMM_SELF, plan, cases(plan.sizes_bytes, plan.burst, group.size - 1))
    for _ in range(plan.blocks):
        for name in modules():
            _block(name, group, run)
    if group.rank == 0:
        _report(run, about, group.size, options.output)


def _block(name: str, group: Any, run: Run) -> None:
    """Start one contender, measure it, and end it. TensorPipe's threads never sleep: they would take the other's cores.

    Collective: over ``group``.
    """
    rpc = modules()[name]
    worker = f"worker{group.rank}"
    if name == "tensorpipe":
        # A file that all can see in the place of a port; a store over TCP does not survive a second start in one process.
        store = group.broadcast_object(tempfile.mktemp() if group.rank == 0 else None)
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
        rpc.init_rpc(worker, rank=group.rank, world_size=group.size, rpc_backend_options=options)
    else:
        rpc.init_rpc(worker)
    if group.rank == 0:
        try:
            run.measure(name, rpc)
        finally:
            for rank in range(1, group.size):
                rpc.rpc_sync(f"worker{rank}", begin, args=("leave",))
    else:
        follow_phases()  # the contender's threads answer meanwhile
    if name == "tensorpipe":  # or it prints a line for each reference
        rpc.api._delete_all_user_and_unforked_owner_rrefs()
        time.sleep(0.5)
    group.barrier()
    # TensorPipe's graceful shutdown does not end the second time within one process.
    rpc.shutdown(graceful=name != "tensorpipe")
    group.barrier()


class Run:
    """What rank 0 has measured so far.

    Args:
        comm: Of this rank alone: it measures by itself.
        plan: What to measure, and how long.
        made: The cases.
    """

    def __init__(self, comm: Any, plan: Plan, made: list[Case]) -> None:
        self.plan = plan
        self.cases = made
        self.busy: dict[str, list[dict[str, Any]]] = {}
        self.idle: dict[str, list[float]] = {}
        self._comm = comm
        self._series: dict[tuple[int, str], list[timing.Series]] = {}

    def measure(self, name: str, rpc: Any) -> None:
        """Check and time all cases of one contender, once."""
        for place, case in enumerate(self.cases):
            if not case.is_right(rpc, "worker1"):
                raise RuntimeError(f"{case.name} of {case.size_bytes} bytes: wrong result of {name}")
            contender = Contender(name, (partial(case.run, rpc, "worker1"),), ())
            (series,) = timing.time_rounds(self._comm, [contender], self.plan.rounds, self.plan.burst_s)
            self._series.setdefault((place, name), []).append(series)
        self.busy.setdefault(name, []).append(_busy_callee(rpc, self.plan))
        self.idle.setdefault(name, []).append(_idle_share(rpc, self.plan))

    def results(self) -> list[dict[str, Any]]:
        """Return all that was timed, case by case; in order of time, so that rounds of the same number were near each other."""
        made = []
        for place, case in enumerate(self.cases):
            each = []
            for name in modules():
                parts = self._series[place, name]
                rounds_us = tuple(us / case.calls for part in parts for us in part.rounds_us)
                each.append(timing.Series(name, parts[0].passes_per_burst, case.calls, rounds_us))
            made.append(report.result_of(case.name, case.size_bytes // 4, case.size_bytes, each))
        return made


def _report(run: Run, about: dict[str, Any], ranks: int, output: Path) -> None:
    results = run.results()
    for name in dict.fromkeys(result["operation"] for result in results):
        print(f"\n{name}\n{report.table([result for result in results if result['operation'] == name])}")
    busy = {name: {key: float(np.median([one[key] for one in times])) for key in times[0]} for name, times in run.busy.items()}
    idle = {name: float(np.median(shares)) for name, shares in run.idle.items()}
    rows = [(name, values["median_ms"], values["p99_ms"], 100 * idle[name]) for name, values in busy.items()]
    headers = ("", "callee computes in Python:\nmedian, ms", "p99, ms", "idle worker:\n% of a core")
    print(f"\n{tabulate(rows, headers, floatfmt='.2f')}")
    verdicts = collective_goals.judge(results, GOALS)
    print(f"\n{report.goals_table(verdicts)}")
    record = {
        "benchmark": "rpc",
        "environment": about,
        "blocks": run.plan.blocks,
        "rounds": run.plan.rounds,
        "burst_s": run.plan.burst_s,
        "calls_in_async": run.plan.burst,
        "results_checked": True,  # or measure() had raised
        "results": results,
        "callee_computes_in_python": busy,
        "idle_share_of_a_core": idle,
        "goals": verdicts,
    }
    path = output / f"rpc-{environment.library_name(about)}-{ranks}.json"
    report.write_json(record, path)
    print(f"\nwritten to {output.name}: {path.name}", flush=True)


def _busy_callee(rpc: Any, plan: Plan) -> dict[str, float]:
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
    return {"median_ms": float(median), "p99_ms": float(p99), "calls": len(times_ms)}


def _idle_share(rpc: Any, plan: Plan) -> float:
    """Return which part of a core a worker uses that nobody calls."""
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
