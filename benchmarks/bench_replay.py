"""Scaling on networks larger than the machine: messages replayed by SimGrid.

python benchmarks/bench_replay.py judge    # the model of bench_scaling.py
python benchmarks/bench_replay.py judge --add --nodes 1024 --ranks 1024
python benchmarks/bench_replay.py calibrate    # by measured links
python benchmarks/bench_replay.py scale run.json.gz --ranks 64
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replay import calibration, judgement, recorded, records, schedules, simulator, traces
from replay import report as replay_report
from replay.networks import Network

from harness import benchmark_options, plots, report, tables
from scaling import advice, exchanges, steps
from training import gradient_lists

# Computing of a rank's step. ResNet-50: 256 images at 2560 a second; GPT-2 XL: 8192 tokens at 40 %
# of an H100's peak in bf16 (``scaling.advice``).
_JOBS = {
    "ResNet-50": (gradient_lists.resnet50, 0.1),
    "GPT-2 XL": (gradient_lists.gpt2_xl, 6 * 1_557_611_200 * 8192 / advice.GPU_FLOP_RATE),
}
# Ranks up to which long traces are simulated; beyond, each takes minutes.
_MOST_OF_A_RING, _MOST_OF_MANY_BUCKETS, _MANY_BUCKETS = 256, 256, 50
# Where the points at which one algorithm overtakes another are looked for.
_CROSSED_RANKS = (64, 256)
_CROSSED = (
    (exchanges.DOUBLING, exchanges.HALVING),
    (exchanges.DOUBLING, exchanges.RING),
    (exchanges.HALVING, exchanges.RING),
)


def main() -> None:
    options = _parser().parse_args()
    if simulator.installed() is None:
        raise SystemExit(simulator.MISSING)
    options.run(options)


def _judge(options: argparse.Namespace) -> None:
    from mpidist import progress_bar

    measure = judgement.replayed(_messages(options))
    if options.quick:
        options.ranks, options.nodes, options.rates = [64], 64, options.rates[:1]
    path = options.output / "replay-simgrid.json"
    record = _empty_record(options)
    # Other assumptions are refused before minutes of simulation.
    _completed(options, path, record)
    costs = advice.gpu_costs(json.loads(advice.GPU_FILE.read_text(encoding="utf-8")))
    jobs = [
        judgement.Job(name, seconds, steps.buckets_of(shapes()), costs)
        for name, (shapes, seconds) in _JOBS.items()
        if name in options.jobs
    ]
    cases = [(kind, rate) for kind in options.networks for rate in options.rates]
    for kind, rate in progress_bar.track(cases, "networks", 0):
        for name, entries in _judged(_network(options, kind, rate), jobs, options, measure).items():
            record[name] += entries
    record["choices"] = judgement.choices(record["steps"])
    record = _completed(options, path, record)
    report.write_json(record, path)
    print(f"{replay_report.text_of(record)}\n\n{plots.beside(path)}")


def _empty_record(options: argparse.Namespace) -> dict[str, Any]:
    run = {
        "date": datetime.date.today().isoformat(),
        **{name: getattr(options, name) for name in ("nodes", "networks", "rates", "ranks")},
        **{name: getattr(options, name) for name in ("libraries", "jobs", "parts", "sizes")},
    }
    return {
        "benchmark": "replay",
        "simgrid": simulator.version(),
        "assumptions": {
            "nodes": options.nodes,
            "rate_gbit_s": options.rates[0],
            "latency_us": options.latency_us,
            "overhead_us": options.overhead_us,
            "taper": options.taper,
            "library": options.libraries[0],
            "fitted_ranks": list(judgement.FITTED_RANKS),
        },
        "runs": [run],
        **{name: [] for name in records.PARTS},
        "choices": [],
    }


def _completed(options: argparse.Namespace, path: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Return the run's record, with ``--add`` the one of the file with the run's cases."""
    if not options.add:
        return record
    try:
        return records.added(json.loads(path.read_text(encoding="utf-8")), record)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: {error}") from None


def _judged(
    network: Network,
    jobs: Sequence[judgement.Job],
    options: argparse.Namespace,
    measure: judgement.Measure,
) -> dict[str, list[Any]]:
    """Return the judged cases of one network by the record's names."""
    one_round = judgement.round_fit(network, measure)
    found: dict[str, list[Any]] = {name: [] for name in records.PARTS}
    for library in options.libraries:
        fit = judgement.fitted(network, library, one_round, measure)
        if "collectives" in options.parts:
            found["collectives"] += judgement.judged_collectives(
                network, library, fit, options.ranks, measure, options.sizes
            )
        for job in jobs:
            is_long = len(job.buckets) >= _MANY_BUCKETS
            takes_rings = schedules.takes_rings(library)
            if is_long and (takes_rings or network.rate_gbit_s != options.rates[0]):
                continue
            # A ring of many nodes has a million messages for each bucket.
            most = _MOST_OF_A_RING if takes_rings else math.inf
            most = min(most, _MOST_OF_MANY_BUCKETS) if is_long else most
            ranks = [count for count in options.ranks if count <= most]
            if "steps" in options.parts:
                found["steps"] += [
                    judgement.judged_step(job, network, library, fit, count, hook, measure)
                    for count in ranks
                    for hook in judgement.HOOKS
                ]
            if "shards" in options.parts and not is_long:
                found["shards"] += [
                    judgement.judged_shards(job, network, library, one_round, count, measure)
                    for count in ranks
                ]
    if "crossings" in options.parts:
        found["crossings"] = [
            judgement.judged_crossing(network, count, first, second, one_round, measure)
            for count in options.ranks
            if count in _CROSSED_RANKS
            for first, second in _CROSSED
        ]
    return found


def _calibrate(options: argparse.Namespace) -> None:
    measured = json.loads(options.measured.read_text(encoding="utf-8"))
    record = calibration.run(measured["jobs"])
    report.write_json(record, options.output / "replay-calibration.json")
    print(calibration.text_of(record))


def _scale(options: argparse.Namespace) -> None:
    try:
        plan = recorded.plan(options.file, options.of_rank)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
    measure = judgement.replayed(_messages(options))
    rows = []
    for kind in options.networks:
        network = _network(options, kind, options.rates[0])
        for count in options.ranks:
            choose = functools.partial(schedules.chosen, options.libraries[0], ranks=count)
            seconds = measure(network, count, traces.step(plan, count, choose))
            rows.append((kind, count, f"{1e3 * seconds:.2f}", f"{plan.compute_s / seconds:.2f}"))
    print(
        f"{len(plan.messages)} all-reduces of {sum(map(sum, plan.messages)):,} bytes, "
        f"{1e3 * plan.compute_s:.2f} ms computing a step; SIMULATED"
    )
    print(tables.text(rows, ("network", "ranks", "ms a step", "efficiency"), keys=2))


def _messages(options: argparse.Namespace) -> simulator.Messages:
    return simulator.Messages(options.overhead_us / 1e6)


def _network(options: argparse.Namespace, kind: str, rate: float) -> Network:
    try:
        return Network(kind, options.nodes, rate, options.latency_us / 1e6, options.taper)
    except ValueError as error:
        raise SystemExit(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    judge = commands.add_parser("judge", help="errors of the model on simulated networks")
    judge.set_defaults(run=_judge)
    _add_network(judge)
    judge.add_argument("--jobs", nargs="+", choices=_JOBS, default=list(_JOBS), metavar="NAME")
    judge.add_argument(
        "--add", action="store_true", help="the cases to the record that the folder has"
    )
    judge.add_argument(
        "--parts", nargs="+", choices=records.PARTS, default=list(records.PARTS), metavar="PART"
    )
    judge.add_argument(
        "--sizes", type=int, nargs="+", metavar="BYTES", help="of the judged all-reduces"
    )
    benchmark_options.add(judge, "output", "quick")
    calibrate = commands.add_parser("calibrate", help="the simulator beside measured links")
    calibrate.set_defaults(run=_calibrate)
    calibrate.add_argument(
        "--measured",
        type=Path,
        default=benchmark_options.RESULTS / "scaling-openmpi.json",
        metavar="RECORD",
        help="of bench_scaling.py, with jobs on links",
    )
    benchmark_options.add(calibrate, "output")
    scale = commands.add_parser("scale", help="a timeline's step on more nodes")
    scale.set_defaults(run=_scale)
    scale.add_argument("file", type=Path, help="of MPIDIST_TRACE")
    scale.add_argument("--of-rank", type=int, default=0, help="whose step is repeated")
    _add_network(scale)
    return parser


def _add_network(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--networks",
        nargs="+",
        choices=("fat tree", "dragonfly"),
        default=["fat tree", "dragonfly"],
        metavar="NETWORK",
        help="fat tree, dragonfly; both",
    )
    parser.add_argument("--nodes", type=int, default=512, help="of the network: a power of two")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(judgement.JUDGED_RANKS))
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[100.0, 10.0], metavar="GBIT_S", help="of a cable"
    )
    parser.add_argument("--latency-us", type=float, default=1.0, help="of a cable")
    parser.add_argument(
        "--overhead-us", type=float, default=1.0, help="of a message, at each of its ends"
    )
    parser.add_argument("--taper", type=int, default=1, help="cables of nodes over those above")
    parser.add_argument(
        "--libraries", nargs="+", choices=schedules.LIBRARIES, default=["mpich", "openmpi"]
    )


if __name__ == "__main__":
    main()
