"""Compare calls by mpidist.rpc with a floor, between workers that read data only, and with torch's RPC over TensorPipe, in turns.

mpirun --bind-to none -n 2 python benchmarks/bench_rpc.py
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import collective_goals
import environment
import numpy as np
import report
import rpc_cases
import timing
import torch
from collective_goals import Goal
from rpc_cases import Case, Reference, begin, end_of_phase, follow_phases, noop
from tabulate import tabulate
from timing import Contender

import mpidist.comm

_KI, _MI = 1 << 10, 1 << 20
FLOOR, PING_PONG, NOOP, FEWER = "floor", "ping-pong", "mpidist no-op", "mpidist, fewer"


def _within(operation: str, size: int, right: str, factor: float) -> Goal:
    """Return the goal that one of our calls costs at most so many times another."""
    over = {FLOOR: "the floor", PING_PONG: "mpi4py's ping-pong", NOOP: "our no-op"}[right]
    text = f"{_named(operation, size)}: our time over {over} ≤ {factor:g}"
    return Goal(
        text, operation, "mpidist", right, "ratio_of_medians", factor, False, lambda s: s == size
    )


def _linear(count: int, factor: float) -> Goal:
    size = count * rpc_cases.SMALL_BYTES
    text = f"tensor of {count} in one message: our time over one of {count // 10} ≤ {factor:g}"
    return Goal(
        text,
        "tensor of many",
        "mpidist",
        FEWER,
        "ratio_of_medians",
        factor,
        False,
        lambda s: s == size,
    )


def _data_only(case: Case) -> Goal:
    """Return the goal that a call between workers that read data only costs at most 1.3 times one between others."""
    operation, size = case.operation, case.size_bytes
    text = f"{_named(operation, size)}: data only over what may be pickles ≤ 1.3"
    return Goal(
        text,
        operation,
        rpc_cases.DATA_ONLY,
        "mpidist",
        "ratio_of_medians",
        1.3,
        False,
        lambda s: s == size,
    )


def _faster(operation: str, size: int, factor: float) -> Goal:
    text = f"{_named(operation, size)}: TensorPipe's time over ours, expected ≥ {factor:g}"
    return Goal(
        text,
        operation,
        "tensorpipe",
        "mpidist",
        "ratio_of_medians",
        factor,
        True,
        lambda s: s == size,
    )


def _named(operation: str, size: int) -> str:
    return f"{operation}, {collective_goals.format_bytes(size)}" if size else operation


GOALS = (
    _within("no-op", 0, FLOOR, 1.5),
    _within("echo", _KI, FLOOR, 2.5),
    _within("async", 0, FLOOR, 1.8),
    _within("remote + to_here", 0, FLOOR, 3),
    _within("remote + to_here", _KI, FLOOR, 5),
    _within("remote of torch.add + to_here", _KI, FLOOR, 5),
    _within("RRef and tensor", 4 * _KI, NOOP, 2.5),
    _within("echo", 4 * _MI, PING_PONG, 1.2),
    # Linear time, but for how the machine's speed wanders.
    _linear(1000, 1.2),
    _faster("no-op", 0, 12),
    _faster("echo", _KI, 12),
    _faster("echo", 4 * _MI, 1.5),
    _faster("async", 0, 5),
    _faster("remote + to_here", 0, 8),
)
BUSY_MEDIAN_MS, BUSY_P99_MS, IDLE_SHARE = 0.5, 3.0, 0.02


@dataclass(frozen=True)
class Plan:
    """What to measure, and how long."""

    sizes_bytes: tuple[int, ...] = (_KI, 16 * _KI, 256 * _KI, 4 * _MI, 64 * _MI)
    many: tuple[int, ...] = (1, 10, 100, 1000)  # small tensors in one message
    burst: int = 2000
    blocks: int = 6  # how often the contenders take turns
    rounds: int = 4
    burst_s: float = 0.04
    busy_s: float = 1.5  # for a callee that computes
    settle_s: float = 1.0  # from the last call to where a worker counts as idle
    idle_s: float = 3.0
    idle_blocks: int = 3  # of the blocks, the first so many


QUICK = Plan((_KI, 256 * _KI), (1, 10), 50, 1, 2, 0.001, 0.1, 0.05, 0.1, 1)


def main() -> None:
    options = _arguments()
    plan = QUICK if options.quick else Plan()
    plan = replace(plan, blocks=options.blocks or plan.blocks)
    torch.set_num_threads(1)
    group = mpidist.comm.init()
    if group.size < 2:
        raise SystemExit(
            "start at least 2 ranks: mpirun --bind-to none -n 2 python benchmarks/bench_rpc.py"
        )
    from mpi4py import MPI

    about = environment.describe(MPI.COMM_WORLD)
    if group.rank == 0:
        print(f"{about['mpi_library']}, torch {about['torch']}, {group.size} ranks, {about['cpu']}")
        print(environment.binding(about), flush=True)
    timing.touch_memory()
    made = rpc_cases.cases(plan.sizes_bytes, plan.burst, group.size - 1, plan.many)
    made = rpc_cases.chosen(made, options.only)
    if not made:
        raise SystemExit(f"no case is named like {', '.join(options.only)}")
    names = [name for name in rpc_cases.modules() if options.tensorpipe or name != "tensorpipe"]
    run = Run(MPI.COMM_SELF, plan, made, names, has_threads=not options.only)
    blocks = [
        partial(_floor_block, MPI.COMM_WORLD, run),
        *(partial(_block, name, group, run) for name in names),
    ]
    for number in range(plan.blocks):
        for place in range(len(blocks)):
            blocks[(place + number) % len(blocks)]()
    if group.rank == 0:
        _report(
            run, about, group.size, options.output, bool(options.only) or not options.tensorpipe
        )


def _floor_block(comm: Any, run: Run) -> None:
    """Measure what a call and a message cost at least, with no contender up.

    Collective: over ``comm``.
    """
    import rpc_floor  # needs MPI, which is started by now

    floor = rpc_floor.Floor(comm)
    if comm.Get_rank() == 0:
        if floor.rpc_sync(1, rpc_cases.one) != 1:
            raise RuntimeError("wrong result of the floor")
        run.time(Reference(FLOOR, "no-op", 0), partial(floor.rpc_sync, 1, noop))
        for rank in range(1, comm.Get_size()):
            floor.leave(rank)
    else:
        floor.serve()
    floor.close()
    for size in (case.size_bytes for case in run.cases if case.operation == "echo"):
        # Both ends use the same memory each time, and have touched it.
        memory, back = np.ones(size, np.uint8), np.zeros(size, np.uint8)
        if comm.Get_rank() == 0:
            run.time(
                Reference(PING_PONG, "echo", size),
                partial(rpc_floor.round_trip, comm, 1, memory, back),
            )
            rpc_floor.end_bounce(comm, 1)
            if not np.array_equal(memory, back):
                raise RuntimeError("wrong result of the ping-pong")
        elif comm.Get_rank() == 1:
            rpc_floor.bounce(comm, 0, back)
    comm.Barrier()


def _block(name: str, group: Any, run: Run) -> None:
    """Start one contender, measure it, and end it.

    TensorPipe's threads never sleep: while it is up, they take the others' cores.

    Collective: over ``group``.
    """
    rpc = rpc_cases.start(name, group)
    if group.rank == 0:
        try:
            run.measure(name, rpc)
        finally:
            for rank in range(1, group.size):
                rpc.rpc_sync(f"worker{rank}", begin, args=("leave",))
    else:
        follow_phases()  # the contender's threads answer meanwhile
    rpc_cases.end(name, group)


class Run:
    """What rank 0 has measured so far.

    Args:
        comm: Of this rank alone: it measures by itself.
        plan: What to measure, and how long.
        cases: The cases.
        names: The contenders that take part.
        has_threads: Measure the callee that computes and the one that idles, too.
    """

    def __init__(
        self, comm: Any, plan: Plan, cases: list[Case], names: list[str], has_threads: bool
    ) -> None:
        self.plan = plan
        self.cases = cases
        self.names = names
        self.busy: dict[str, list[dict[str, Any]]] = {}
        self.idle: dict[str, list[float]] = {}
        self._comm = comm
        self._has_threads = has_threads
        self._series: dict[Reference, list[timing.Series]] = {}

    def measure(self, name: str, rpc: Any) -> None:
        """Check and time all cases of one contender, once."""
        for case in self.cases:
            what, rounds = Reference(name, case.operation, case.size_bytes), self.plan.rounds
            if case.has_references and name == "tensorpipe":
                # References work after its first start in a process alone: all rounds are there.
                if what in self._series:
                    continue
                rounds *= self.plan.blocks
            one_pass = case.make(rpc, "worker1")
            if not case.is_right(one_pass()):
                raise RuntimeError(
                    f"{case.operation} of {case.size_bytes} bytes: wrong result of {name}"
                )
            self.time(what, one_pass, rounds)
        if self._has_threads:
            self.busy.setdefault(name, []).append(_busy_callee(rpc, self.plan))
            if len(self.idle.setdefault(name, [])) < self.plan.idle_blocks:
                self.idle[name].append(_idle_share(rpc, self.plan))

    def time(self, what: Reference, one_pass: rpc_cases.Pass, rounds: int | None = None) -> None:
        """Time some rounds of a case of a contender; the plan's number if None."""
        contender = Contender(what.contender, (one_pass,), ())
        (series,) = timing.time_rounds(
            self._comm, [contender], rounds or self.plan.rounds, self.plan.burst_s
        )
        self._series.setdefault(what, []).append(series)

    def results(self) -> list[dict[str, Any]]:
        """Return all that was timed, case by case.

        Rounds stand in order of time: those of the same number were near each other.
        """
        calls = {(case.operation, case.size_bytes): case.calls for case in self.cases}
        made = []
        for case in self.cases:
            shown = [
                (name, Reference(name, case.operation, case.size_bytes)) for name in self.names
            ]
            each = []
            for label, what in [*shown, *case.against]:
                parts = self._series[what]
                divisor = calls.get((what.operation, what.size_bytes), 1)
                rounds_us = tuple(us / divisor for part in parts for us in part.rounds_us)
                each.append(timing.Series(label, parts[0].passes_per_burst, divisor, rounds_us))
            made.append(
                report.result_of(case.operation, case.size_bytes // 4, case.size_bytes, each)
            )
        return made


def _report(run: Run, about: dict[str, Any], ranks: int, output: Path, is_part: bool) -> None:
    results = run.results()
    for name in dict.fromkeys(result["operation"] for result in results):
        print(
            f"\n{name}\n{report.table([result for result in results if result['operation'] == name])}"
        )
    busy = {
        name: {key: float(np.median([one[key] for one in times])) for key in times[0]}
        for name, times in run.busy.items()
    }
    idle = {name: float(np.median(shares)) for name, shares in run.idle.items()}
    if busy:
        rows = [
            (name, values["median_ms"], values["p99_ms"], 100 * idle[name])
            for name, values in busy.items()
        ]
        headers = (
            "",
            "callee computes in Python:\nmedian, ms",
            "p99, ms",
            "idle worker:\n% of a core",
        )
        print(f"\n{tabulate(rows, headers, floatfmt='.2f')}")
    goals = [*GOALS, *map(_data_only, run.cases)]
    verdicts = [
        *collective_goals.judge(results, goals),
        *_threads_verdicts(busy.get("mpidist"), idle.get("mpidist")),
    ]
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
    # What leaves something out does not take the place of a whole record.
    path = output / f"rpc-{environment.library_name(about)}-{ranks}{'-part' * is_part}.json"
    report.write_json(record, path)
    print(f"\nwritten to {output.name}: {path.name}", flush=True)


def _threads_verdicts(busy: dict[str, Any] | None, idle: float | None) -> list[dict[str, Any]]:
    below = collective_goals.judge_below
    return [
        below(
            f"callee that computes: median < {BUSY_MEDIAN_MS:g} ms",
            busy and busy["median_ms"],
            BUSY_MEDIAN_MS,
        ),
        below(
            f"callee that computes: p99 < {BUSY_P99_MS:g} ms", busy and busy["p99_ms"], BUSY_P99_MS
        ),
        below(f"idle worker: < {IDLE_SHARE:g} of a core", idle, IDLE_SHARE),
    ]


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
    rpc.rpc_sync("worker1", begin, args=("idle", plan.settle_s, plan.idle_s))
    time.sleep(plan.settle_s + plan.idle_s + 0.1)
    return float(rpc.rpc_sync("worker1", rpc_cases.idle_share))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="see that it runs: few sizes, few rounds, figures of no worth",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="cases whose name contains one of these",
    )
    parser.add_argument(
        "--blocks",
        type=int,
        help="how often the contenders take turns; more for a machine that is not quiet",
    )
    parser.add_argument(
        "--no-tensorpipe", dest="tensorpipe", action="store_false", help="leave TensorPipe out"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
