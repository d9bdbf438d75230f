"""Scaling of a data-parallel step: measurements, a latency-bandwidth model, and predictions.

mpirun --bind-to none -n 2 python benchmarks/bench_scaling.py measure    # one job, any size
python benchmarks/bench_scaling.py report scaling-*.json                 # tables, model, plot
python benchmarks/bench_scaling.py sweep --links 10gbit 1gbit 100mbit    # both, on this machine
python benchmarks/bench_scaling.py startup --jobs 2 4 8 16 32            # start-up and memory
python benchmarks/bench_scaling.py advise --bandwidth 10 --parameters 350e6 --ranks 64
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
_OPERATIONS = ("all_reduce", "average", "all_gather", "reduce_scatter", "broadcast", "barrier")
COMMANDS = ("measure", "report", "sweep", "startup", "advise")


def main() -> None:
    words = sys.argv[1:]
    # Without a command: measure this job.
    if not words or (words[0] not in COMMANDS and words[0] not in ("-h", "--help")):
        words = ["measure", *words]
    options = _parser().parse_args(words)
    if words[0] in ("sweep", "startup", "advise"):
        # Children have sessions of their own. At SIGTERM an exception unwinds, and ends the
        # children first.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    options.run(options)


def _measure(options: argparse.Namespace) -> None:
    import environment
    import report
    import scaling_measure

    if options.quick:
        options.sizes, options.rounds, options.step_rounds = (8, 2048), 1, 1
        options.burst_s, options.networks, options.batch, options.total_batch = 0.0, ["32x2"], 2, 12
    options.sizes = options.sizes or scaling_measure.SIZES
    options.operations = options.operations or _OPERATIONS
    record = scaling_measure.run(options)
    if record is None:
        return
    about = record["environment"]
    parts = ["scaling", environment.library_name(about), str(record["ranks"]), options.link]
    path = options.output / f"{'-'.join(filter(None, parts))}.json"
    report.write_json(record, path)
    marked = f" on {record['cores']} cores: OVERSUBSCRIBED" if record["oversubscribed"] else ""
    print(
        f"{record['ranks']} ranks{marked}: written to {options.output.name}: {path.name}",
        flush=True,
    )


def _sweep(options: argparse.Namespace) -> None:
    import scaling_jobs as jobs

    passed = ["measure", *(["--quick"] if options.quick else [])]
    todo = [jobs.plain(ranks, passed, options.launcher) for ranks in options.jobs]
    missed: dict[str, str] = {}
    if options.links:
        reason = jobs.why_no_link(options.mpich)
        for link in options.links:
            if reason is None:
                todo += [
                    jobs.on_link(link, each, passed, options.mpich)
                    for each in options.ranks_per_node
                ]
            else:
                missed[link] = reason
    records: list[dict[str, Any]] = []
    for job in todo:
        written, why = jobs.run(job, options.limit_s)
        records += written
        if why is not None:
            missed[job.name] = why
        print(f"{job.name}: {why or 'measured'}", flush=True)
    for name, why in missed.items():
        print(f"left out: {name}, {why}", flush=True)
    if not records:
        raise SystemExit("no job ended well: nothing to report")
    _write(records, missed, options.output)


def _report(options: argparse.Namespace) -> None:
    records: list[dict[str, Any]] = []
    for path in options.files:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SystemExit(
                f"{path}: cannot be read as a record of bench_scaling.py ({error}); run `measure` "
                "again"
            ) from None
        records += found.get("jobs", [found]) if isinstance(found, dict) else [{}]
    for record in records:
        if record.get("benchmark") != "scaling" or "collectives" not in record:
            raise SystemExit(
                "a file is no record of `bench_scaling.py measure` or `sweep`: name files that "
                "these wrote"
            )
    _write(records, {}, options.output)


def _write(records: list[dict[str, Any]], missed: dict[str, str], output: Path) -> None:
    import scaling_report

    print(scaling_report.write(records, missed, output), flush=True)


def _startup(options: argparse.Namespace) -> None:
    import scaling_startup

    scaling_startup.run(options)


def _advise(options: argparse.Namespace) -> None:
    import scaling_advice

    if not (options.bandwidth > 0 and options.parameters >= 1000) or options.ranks < 2:
        raise SystemExit(
            "advise needs a --bandwidth above 0, at least 1000 --parameters and 2 --ranks"
        )
    if (
        options.compute_ms is not None and not options.compute_ms > 0
    ) or options.ranks % options.ranks_per_node:
        raise SystemExit("--compute-ms must be above 0, and --ranks a multiple of --ranks-per-node")
    print(scaling_advice.answer(options), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(metavar="COMMAND")
    output: dict[str, Any] = {
        "type": Path,
        "default": RESULTS,
        "help": "folder of the JSON and the plot",
    }
    quick: dict[str, Any] = {
        "action": "store_true",
        "help": "see that it runs: figures of no worth",
    }

    one = commands.add_parser(
        "measure", help="this job, started by mpirun or srun; without a command, too"
    )
    one.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    one.add_argument(
        "--networks",
        nargs="+",
        type=_network,
        default=["512x4", "1024x8"],
        metavar="WIDTHxDEPTH",
        help="MLPs, the small first",
    )
    one.add_argument("--batch", type=_positive, default=64, help="of each rank, in weak scaling")
    one.add_argument(
        "--total-batch", type=_positive, default=192, help="of all ranks, in strong scaling"
    )
    one.add_argument("--bucket-cap-mb", type=float, default=1.0)
    one.add_argument(
        "--operations", nargs="+", choices=_OPERATIONS, metavar="NAME", help=" ".join(_OPERATIONS)
    )
    one.add_argument(
        "--sizes", nargs="+", type=_positive, metavar="BYTES", help="8, 32, … 32 MiB if not given"
    )
    one.add_argument("--rounds", type=_positive, default=5, help="for each size")
    one.add_argument("--step-rounds", type=_positive, default=4, help="for each step")
    one.add_argument("--burst-s", type=float, default=0.008)
    one.add_argument(
        "--longest-call-s",
        type=float,
        default=0.12,
        help="an operation goes to no larger size after such a call",
    )
    one.add_argument(
        "--longest-step-s",
        type=float,
        default=0.8,
        help="networks whose steps would take longer are left out",
    )
    one.add_argument(
        "--link",
        type=_link,
        default=os.environ.get("MPIDIST_LINK", ""),
        help="rate of the link between nodes: 25gbit",
    )
    one.add_argument("--output", **output)
    one.add_argument("--quick", **quick)
    one.set_defaults(run=_measure)

    many = commands.add_parser(
        "sweep", help="jobs of several sizes on this machine, then the report"
    )
    many.add_argument(
        "--jobs", type=_positive, nargs="+", default=[1, 2, 3, 4, 6, 8], metavar="RANKS"
    )
    many.add_argument(
        "--links",
        nargs="*",
        type=_link,
        default=[],
        metavar="RATE",
        help="as tc takes it: 10gbit 1gbit 100mbit (root, MPICH)",
    )
    many.add_argument(
        "--ranks-per-node",
        type=_positive,
        nargs="+",
        default=[1, 2, 3, 4],
        help="on each of a link's two nodes",
    )
    many.add_argument(
        "--mpich",
        type=Path,
        default=RESULTS.parents[1] / ".mpich",
        metavar="FOLDER",
        help="of the MPICH for links",
    )
    many.add_argument(
        "--launcher",
        help="command line up to -n; mpirun --oversubscribe --bind-to none if not given",
    )
    many.add_argument("--limit-s", type=float, default=150.0, help="for each job")
    many.add_argument("--output", **output)
    many.add_argument("--quick", **quick)
    many.set_defaults(run=_sweep)

    told = commands.add_parser(
        "report", help="tables, model, JSON and plot from records of `measure`"
    )
    told.add_argument("files", type=Path, nargs="+", metavar="FILE")
    told.add_argument("--output", **output)
    told.set_defaults(run=_report)

    start = commands.add_parser(
        "startup", help="time to the first step, memory, files, threads, messages, by ranks"
    )
    start.add_argument(
        "--jobs", type=_positive, nargs="+", default=[2, 4, 8, 16, 32], metavar="RANKS"
    )
    start.add_argument(
        "--what",
        choices=("mpi4py", "mpidist"),
        help="be one rank of such a job, started by mpirun or srun",
    )
    start.add_argument(
        "--launcher",
        help="command line up to -n; mpirun --oversubscribe --bind-to none if not given",
    )
    start.add_argument("--limit-s", type=float, default=120.0, help="for each job")
    start.add_argument("--output", **output)
    start.set_defaults(run=_startup)

    ask = commands.add_parser("advise", help="which hook pays in your own case")
    ask.add_argument(
        "--bandwidth", type=float, required=True, metavar="GBIT_S", help="of a node's link"
    )
    ask.add_argument("--parameters", type=float, required=True, help="of the network: 350e6")
    ask.add_argument("--ranks", type=_positive, required=True)
    ask.add_argument("--ranks-per-node", type=_positive, default=1)
    ask.add_argument(
        "--compute-ms",
        type=float,
        help="forward and backward pass of one rank; estimated if not given",
    )
    ask.add_argument("--bucket-cap-mb", type=float, help="DDP's; 25 if not given")
    ask.add_argument(
        "--processor",
        choices=("cpu", "gpu"),
        default="cpu",
        help="gpu: an H100's hooks, from results/",
    )
    ask.add_argument(
        "--measure",
        action="store_true",
        help="measure hooks and computing here first, in a job of one rank",
    )
    ask.add_argument(
        "--model", type=Path, help="JSON of sweep or report; the one in results/ if not given"
    )
    ask.add_argument("--launcher", help="command line up to -n, for --measure")
    ask.add_argument("--limit-s", type=float, default=60.0, help="for --measure")
    ask.set_defaults(run=_advise)
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _network(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no WIDTHxDEPTH, as in 1024x8")
    return text


def _link(text: str) -> str:
    if text and not re.fullmatch(r"[1-9]\d*(gbit|mbit)", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no rate of a link, as in 25gbit or 100mbit")
    return text


if __name__ == "__main__":
    main()
