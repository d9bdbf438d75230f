"""Scaling of data-parallel steps: measurements, a model, predictions, memory.

mpidist bench scaling -n 2 -- measure                     # one job, any size
mpidist bench scaling -- report scaling-*.json            # tables, model, plot
mpidist bench scaling -- sweep --links 10gbit 1gbit       # both, here
mpidist bench scaling -- startup --jobs 2 4 8 16 32       # start-up and memory
mpidist bench scaling -- advise --bandwidth 10 --parameters 350e6 --ranks 64
mpidist bench scaling -- advise memory --parameters 350e6 --ranks 64
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

from scaling import options as scaling_options


def main() -> None:
    words = sys.argv[1:]
    # Without a command: measure this job.
    if not words or (words[0] not in _RUNS and words[0] not in ("-h", "--help")):
        words = ["measure", *words]
    options = _parser().parse_args(words)
    ends = (signal.SIGINT, signal.SIGTERM) if words[0] in ("sweep", "startup", "advise") else ()
    # Children have sessions of their own. At SIGTERM and Ctrl-C an exception unwinds, and ends the
    # children first.
    former = [(one, signal.signal(one, lambda number, _: sys.exit(128 + number))) for one in ends]
    try:
        _RUNS[words[0]](options)
    finally:
        for number, handler in former:
            signal.signal(number, handler)


def _measure(options: argparse.Namespace) -> None:
    from harness import environment, report
    from scaling import measure as scaling_measure

    if options.quick:
        options.sizes, options.rounds, options.step_rounds = (8, 2048), 1, 1
        options.burst_s, options.networks, options.batch, options.total_batch = 0.0, ["32x2"], 2, 12
    options.sizes = options.sizes or scaling_measure.SIZES
    options.operations = options.operations or scaling_options.OPERATIONS
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
    from mpidist import progress_bar
    from scaling import jobs

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
    for job in progress_bar.track(todo, "jobs", 0):
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
    from scaling import report as scaling_report

    print(scaling_report.write(records, missed, output), flush=True)


def _startup(options: argparse.Namespace) -> None:
    from scaling import startup as scaling_startup

    scaling_startup.run(options)


def _advise(options: argparse.Namespace) -> None:
    from scaling import answer as scaling_answer

    if options.what == "memory":
        if not 0 <= options.activations_mib < math.inf:
            raise SystemExit("advise memory needs --activations-mib from 0 up, in MiB")
        print(scaling_answer.memory(options), flush=True)
        return
    if options.bandwidth is None or not options.bandwidth > 0 or options.ranks < 2:
        raise SystemExit("advise needs a --bandwidth above 0, and at least 2 --ranks")
    if (
        options.compute_ms is not None and not options.compute_ms > 0
    ) or options.ranks % options.ranks_per_node:
        raise SystemExit("--compute-ms must be above 0, and --ranks a multiple of --ranks-per-node")
    print(scaling_answer.answer(options), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    scaling_options.add_commands(parser.add_subparsers(metavar="COMMAND"))
    return parser


_RUNS = {
    "measure": _measure, "report": _report, "sweep": _sweep, "startup": _startup, "advise": _advise,
}  # fmt: skip


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        # Who reads the tables has enough; Python's own flush at exit would fail, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
