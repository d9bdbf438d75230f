"""Time distributed autograd in turns: mpidist over mpidist.rpc, and torch over TensorPipe.

mpirun --bind-to none -n 2 python benchmarks/bench_autograd.py
mpirun --bind-to none -n 3 python benchmarks/bench_autograd.py    (trainers and a server)
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

import autograd_tensorpipe

import mpidist.comm
import mpidist.rpc
from harness import benchmark_options, report, tables, timing
from harness.goals import Goal, judge, judge_below
from harness.job import Job
from mpidist import progress_bar
from rpc import autograd_cases, autograd_local
from rpc import workers as rpc_workers
from rpc.autograd_cases import FEW, STEP, TRAINERS, Case
from rpc.autograd_counts import memory_growth, messages_per_pass
from rpc.autograd_stacks import BATCH, WIDTH, stack_of

_PLAN_SHARE, _PLAN_SHARE_SEVERAL, _SEVERAL = 0.10, 0.25, 3
_GROWTH_MIB = 4.0


def _goal(operation: str, left: str, right: str, factor: float, at_least: bool) -> Goal:
    named = {"tensorpipe": "TensorPipe's", "smart": "SMART's", "mpidist": "FAST's"}
    text = (
        f"{operation}: {named[left]} time over {named[right]} {'≥' if at_least else '≤'} {factor:g}"
    )
    return Goal(
        text, operation, left, right, "ratio_of_medians", factor, at_least, lambda size: True
    )


GOALS = (
    *(
        _goal(operation, "tensorpipe", "mpidist", factor, True)
        for operation in (FEW, STEP)
        for factor in (3, 4)
    ),
    *(_goal(operation, "smart", "mpidist", 1.25, False) for operation in (FEW, STEP)),
)


@dataclass(frozen=True)
class Settings:
    """Sizes of the cases, and repetitions of the measurements."""

    depths: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    blocks: int = 4  # of each implementation
    rounds: int = 5
    burst_s: float = 0.04
    nodes: int = 12_000
    planning_rounds: int = 7
    contexts: int = 10_000


QUICK = Settings((1, 4), 1, 1, 0.001, 400, 2, 60)


def main() -> None:
    """Measure all contenders and write the record. Collective over all ranks."""
    options = _arguments()
    settings = QUICK if options.quick else Settings()
    contexts = settings.contexts if options.contexts is None else options.contexts
    settings = replace(settings, blocks=options.blocks or settings.blocks, contexts=contexts)
    with Job() as job:
        workers = job.group.size
        cases = autograd_cases.cases(settings.depths, workers)
        cases = [case for case in cases if not options.only or case.operation in options.only]
        if not cases:
            raise SystemExit(f"no case is named {', '.join(options.only)}")
        job.show()
        rpc_workers.start("mpidist", job.group)
        if job.is_first:
            try:
                _measure(settings, cases, job, options)
            finally:
                for rank in range(1, workers):
                    mpidist.rpc.rpc_sync(f"worker{rank}", rpc_workers.begin, args=("leave",))
        else:
            # The main thread sleeps, so that an idle worker leaves the cores to TensorPipe.
            rpc_workers.follow_phases()
        rpc_workers.end("mpidist", job.group)


def _measure(settings: Settings, cases: list[Case], job: Job, options: argparse.Namespace) -> None:
    """Measure everything; worker 0 only."""
    workers = job.group.size
    series = _timed(settings, cases, workers, options.tensorpipe)
    planning = [
        autograd_local.planning(settings.nodes, sources, settings.planning_rounds)
        for sources in (1, _SEVERAL)
    ]
    messages = {name: messages_per_pass(name, workers) for name in ("mpidist", "smart")}
    contexts = memory_growth(settings.contexts, workers) if settings.contexts else {}
    results = [
        report.result_of(operation, 0, 0, [_joined(blocks) for blocks in found.values()])
        for operation, found in series.items()
    ]
    verdicts = [*judge(results, GOALS), *_other_verdicts(planning, contexts)]
    _print(results, planning, messages, contexts)
    fields = {
        "blocks": settings.blocks,
        "rounds": settings.rounds,
        "burst_s": settings.burst_s,
        "layer": [WIDTH, WIDTH],
        "batch": BATCH,
        "results": results,
        "planning": planning,
        "messages_per_pass": messages,
        "contexts": contexts,
    }
    is_part = bool(options.only) or not options.tensorpipe
    job.write(options.output, "autograd", fields, verdicts, ["part" * is_part])


def _timed(
    settings: Settings, cases: list[Case], workers: int, has_tensorpipe: bool
) -> dict[str, dict[str, list[timing.Series]]]:
    """Time all blocks; return the series by operation and contender."""
    parts: dict[str, dict[str, list[timing.Series]]] = {case.operation: {} for case in cases}

    def record_series(operation: str, series: timing.Series) -> None:
        parts[operation].setdefault(series.name, []).append(series)

    def ours() -> None:
        stacks = [stack_of("mpidist"), stack_of("smart")]
        for operation, found in autograd_cases.measure(
            stacks, cases, workers, settings.rounds, settings.burst_s
        ).items():
            for series in found:
                record_series(operation, series)

    def theirs() -> None:
        only = tuple(case.operation for case in cases)
        for operation, series in autograd_tensorpipe.measure(
            workers, settings.depths, only, settings.rounds, settings.burst_s
        ).items():
            record_series(operation, series)

    blocks = [ours, theirs] if has_tensorpipe else [ours]
    with progress_bar.bar("blocks", settings.blocks * len(blocks), 0) as advance:
        for number in range(settings.blocks):
            for block in blocks if number % 2 == 0 else reversed(blocks):
                block()
                advance()
    return parts


def _joined(parts: list[timing.Series]) -> timing.Series:
    """Return all blocks of a contender as one series."""
    return replace(parts[0], rounds_us=tuple(us for part in parts for us in part.rounds_us))


def _other_verdicts(
    planning: list[dict[str, Any]], contexts: dict[str, float]
) -> list[dict[str, Any]]:
    one, several = planning
    grown = contexts.get("growth_mib")
    return [
        judge_below(
            f"planning, one source: share of a backward of 12,000 nodes < {_PLAN_SHARE:g}",
            one["share"],
            _PLAN_SHARE,
        ),
        judge_below(
            f"planning, {_SEVERAL} sources: share of a backward of 12,000 nodes < "
            f"{_PLAN_SHARE_SEVERAL:g}",
            several["share"],
            _PLAN_SHARE_SEVERAL,
        ),
        judge_below(f"10⁴ contexts: memory grows by < {_GROWTH_MIB:g} MiB", grown, _GROWTH_MIB),
    ]


def _print(
    results: list[dict[str, Any]],
    planning: list[dict[str, Any]],
    messages: dict[str, dict[str, float]],
    contexts: dict[str, float],
) -> None:
    rows = []
    for result in results:
        times = {name: one["median_us"] for name, one in result["contenders"].items()}
        ratios = {
            (one["left"], one["right"]): one["ratio_of_medians"] for one in result["comparisons"]
        }
        pairs = (("tensorpipe", "mpidist"), ("tensorpipe", "smart"), ("smart", "mpidist"))
        rows.append(
            [
                result["operation"],
                *(times.get(name) for name in ("tensorpipe", "mpidist", "smart")),
                *map(ratios.get, pairs),
            ]
        )
    headers = (
        "µs a pass",
        "TensorPipe",
        "FAST",
        "SMART",
        "TensorPipe /\nFAST",
        "TensorPipe /\nSMART",
        "SMART /\nFAST",
    )
    print(f"\n{tables.text(rows, headers, '.2f')}")
    print(f"\n{tables.text([list(one.values()) for one in planning], list(planning[0]), '.3f')}")
    print("\nmessages of the engine in one pass over 4 layers:")
    print(
        tables.text(
            [
                [name, *(f"{kind} {count:g}" for kind, count in sent.items())]
                for name, sent in messages.items()
            ]
        )
    )
    if contexts:
        print(
            "\n{contexts} contexts in {seconds:.1f} s; memory grows by {growth_mib:.2f} MiB".format(
                **contexts
            )
        )


def _arguments() -> argparse.Namespace:
    parser = benchmark_options.parser(__doc__, "quick")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help=f"cases of these names: {FEW!r}, {TRAINERS!r}, …",
    )
    parser.add_argument(
        "--blocks",
        type=int,
        help="how often the two take turns; more for a machine that is not quiet",
    )
    parser.add_argument(
        "--contexts", type=int, metavar="COUNT", help="one after the other; 0 for none"
    )
    parser.add_argument(
        "--no-tensorpipe", dest="tensorpipe", action="store_false", help="leave TensorPipe out"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
