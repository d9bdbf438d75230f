"""Compare two source trees of mpidist: pairs of short jobs of two ranks, before and after in turn.

Each pair runs one job per tree and benchmark (collectives, ddp, rpc), back to back; the tree that
goes first alternates. Contenders that do not use mpidist (mpi4py, training without DDP, the RPC
floor) run in the same jobs: their differences are the machine's noise.

git worktree add ../before REVISION
python benchmarks/compare_trees.py ../before --pairs 10
"""

from __future__ import annotations

import argparse
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness import benchmark_options, environment, report, tables, timing
from harness.goals import judge_cases
from scaling import jobs as scaling_jobs

_HERE = Path(__file__).resolve().parent
_BENCHMARKS = ("collectives", "ddp", "rpc")
_SIDES = ("before", "after")
_MOST_RATIO, _MOST_US, _SMALL_BYTES = 1.03, 0.3, 64 << 10
_WORST = 12  # rows of the table

Key = tuple[str, str, int, str, bool]


@dataclass(frozen=True)
class Case:
    """One contender's case: a median per job and tree.

    Attributes:
        is_control: The contender does not use mpidist.
        before: Median of each job of the old tree, in microseconds, by pair.
        after: The same of the new tree.
    """

    benchmark: str
    operation: str
    size_bytes: int
    contender: str
    is_control: bool
    before: timing.Series
    after: timing.Series

    @property
    def name(self) -> str:
        size = f" {report.format_bytes(self.size_bytes)}" if self.size_bytes else ""
        return f"{self.operation}{size}, {self.contender}"

    @property
    def ratio(self) -> float:
        """Ratio of the medians over all jobs, after over before."""
        return self.after.median_us / self.before.median_us

    @property
    def difference_us(self) -> float:
        return self.after.median_us - self.before.median_us

    @property
    def is_small(self) -> bool:
        return self.size_bytes < _SMALL_BYTES

    def spread(self) -> tuple[float, float]:
        """Return the 10th and 90th percentile of the pairs' ratios."""
        ratios = np.array(self.after.rounds_us) / np.array(self.before.rounds_us)
        low, high = np.percentile(ratios, (10, 90)).tolist()
        return low, high

    def entry(self) -> dict[str, Any]:
        """Return the case's entry in the JSON."""
        low, high = self.spread()
        return {
            "benchmark": self.benchmark,
            "operation": self.operation,
            "size_bytes": self.size_bytes,
            "contender": self.contender,
            "is_control": self.is_control,
            "before_us": self.before.median_us,
            "after_us": self.after.median_us,
            "ratio_of_medians": self.ratio,
            "ratio_of_pairs_p10": low,
            "ratio_of_pairs_p90": high,
            "difference_us": self.difference_us if self.is_small else None,
            "before_jobs_us": _rounded(self.before),
            "after_jobs_us": _rounded(self.after),
        }


def main() -> None:
    options = _arguments()
    # Jobs have sessions of their own. At SIGTERM an exception unwinds, and ends the job first.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    trees = {"before": options.before.resolve(), "after": options.after.resolve()}
    revisions = {side: _revision(tree) for side, tree in trees.items()}
    print(f"before: {revisions['before']}, after: {revisions['after']}", flush=True)
    timing.touch_memory()
    medians: dict[Key, dict[str, list[float]]] = {}
    about: dict[str, Any] = {}
    start = time.perf_counter()
    for pair in range(options.pairs):
        for benchmark, side in _schedule(pair, options.benchmarks):
            record = _run_job(trees[side], benchmark, options)
            about = about or record["environment"]
            for row in record["rows"]:
                key = (
                    row["benchmark"], row["operation"], row["size_bytes"], row["contender"],
                    row["is_control"],
                )  # fmt: skip
                medians.setdefault(key, {one: [] for one in _SIDES})[side].append(row["median_us"])
        elapsed_s = time.perf_counter() - start
        print(f"pair {pair + 1} of {options.pairs}, {elapsed_s:.0f} s", flush=True)
    cases = [
        Case(*key, *(timing.Series(side, 1, 1, tuple(times[side])) for side in _SIDES))
        for key, times in medians.items()
    ]
    verdicts = judge(cases)
    print(f"\n{_tables(cases, verdicts)}")
    path = options.output / f"trees-{environment.library_name(about)}-{about['ranks']}.json"
    record = {
        "benchmark": "trees",
        "environment": about,
        "revisions": revisions,
        "pairs": options.pairs,
        "rounds": options.rounds,
        # A wrong result ends its job with an error, and the comparison with it.
        "results_checked": True,
        "results": [case.entry() for case in cases],
        "goals": verdicts,
    }
    report.write_json(record, path)
    print(f"\nwritten to {path.parent.name}: {path.name}", flush=True)


def judge(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return the verdict of each bound on mpidist's cases, and on the controls.

    The bounds on the controls show how much of the trees' difference is noise.
    """
    verdicts = []
    for is_control, of in ((False, "mpidist"), (True, "control")):
        chosen = [case for case in cases if case.is_control == is_control]
        ratios = [(case.name, case.ratio) for case in chosen]
        differences = [(case.name, case.difference_us) for case in chosen if case.is_small]
        verdicts += [
            judge_cases(f"{of}: ratio of medians ≤ {_MOST_RATIO:g}", ratios, _MOST_RATIO),
            judge_cases(f"{of}: ≤ +{_MOST_US:g} us below 64 KiB", differences, _MOST_US),
        ]
    return verdicts


def _schedule(pair: int, benchmarks: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield benchmark and side of a pair's jobs; the side that goes first alternates."""
    sides = _SIDES if pair % 2 == 0 else _SIDES[::-1]
    return itertools.product(benchmarks, sides)


def _run_job(tree: Path, benchmark: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one benchmark on one tree; end the comparison if the job fails."""
    command = (
        *scaling_jobs.start_of(options.launcher), "-n", "2", sys.executable,
        str(_HERE / "tree_job.py"), benchmark, "--rounds", str(options.rounds),
    )  # fmt: skip
    variables = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    job = scaling_jobs.Job(benchmark, command, variables)
    records, reason = scaling_jobs.run(job, options.limit_s)
    if reason is not None:
        raise SystemExit(f"{benchmark}, {_revision(tree)}: {reason}")
    (record,) = records
    if Path(record["tree"]) != tree:
        raise SystemExit(f"{benchmark}: the job imported mpidist from another folder than {tree}")
    return record


def _revision(tree: Path) -> str:
    """Return the commit of a tree, with ``-dirty`` if files differ from the commit."""
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _tables(cases: Sequence[Case], verdicts: Sequence[dict[str, Any]]) -> str:
    """Return the cases with the largest ratios and differences, and the verdicts."""
    ours = [case for case in cases if not case.is_control]
    small = [case for case in ours if case.is_small]
    by_ratio = sorted(ours, key=lambda case: -case.ratio)[:_WORST]
    by_difference = sorted(small, key=lambda case: -case.difference_us)[:_WORST]
    headers = ("", "before, us", "after, us", "after / before\n(p10–p90 of pairs)", "difference")
    texts = []
    for title, worst in (("largest ratios", by_ratio), ("largest differences", by_difference)):
        rows = []
        for case in worst:
            low, high = case.spread()
            rows.append((
                f"{case.benchmark}: {case.name}",
                f"{case.before.median_us:.4g}",
                f"{case.after.median_us:.4g}",
                f"{case.ratio:.3f} ({low:.3f}–{high:.3f})",
                f"{case.difference_us:+.2f}",
            ))  # fmt: skip
        texts.append(tables.text(rows, (title, *headers[1:])))
    goals = [
        (one["goal"], "" if one["worst"] is None else f"{one['worst']:.3f}, {one['worst_case']}",
         f"{one['verdict']} ({len(one['missed'])} missed)" if one["missed"] else one["verdict"])
        for one in verdicts
    ]  # fmt: skip
    ratio = np.median([case.ratio for case in ours])
    texts.append(f"median ratio of {len(ours)} cases: {ratio:.3f}")
    texts.append(tables.text(goals, ("goal", "worst", "verdict")))
    return "\n\n".join(texts)


def _rounded(series: timing.Series) -> list[float]:
    return [float(f"{value:.5g}") for value in series.rounds_us]


def _arguments() -> argparse.Namespace:
    parser = benchmark_options.parser(__doc__)
    parser.add_argument("before", type=Path, help="folder of the old source tree")
    parser.add_argument(
        "after", type=Path, nargs="?", default=_HERE.parent, help="the new one; this one if omitted"
    )
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=7, help="of each case in each job")
    parser.add_argument(
        "--benchmarks", nargs="+", choices=_BENCHMARKS, default=_BENCHMARKS, metavar="NAME"
    )
    parser.add_argument("--limit-s", type=float, default=120.0, help="of each job")
    parser.add_argument(
        "--launcher", help="command up to -n; mpirun --oversubscribe --bind-to none if omitted"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
