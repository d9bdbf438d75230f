"""Time whole jobs of one line, from the command to its end, over mpidist and over Gloo.

python benchmarks/bench_startup.py            (without mpirun: it starts the jobs itself)

A job initialises ``torch.distributed``, makes one all-reduce and destroys the group. Both kinds are
started by the same mpirun, in turns; Gloo's ranks meet at a port of rank 0, by the variables that
its users set. ``torchrun`` is what Gloo's users call most, and is shown beside it. The jobs keep
the bytecode of what they import, as an installation does: without, mpidist is compiled anew.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from harness import benchmark_options, environment, report, tables

_JOB = Path(__file__).with_name("scaling") / "startup_job.py"
_LIMIT_S = 120
_ENV_NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"


def main() -> None:
    options = _parsed()
    commands = _commands(options.ranks)
    times: dict[str, list[float]] = {name: [] for name in commands}
    # The one round of --quick only shows that the jobs run.
    for number in [1] if options.quick else range(options.rounds + 1):
        for name, command in commands.items():
            seconds = _timed(command, options.ranks)
            # The first round reads the files of torch and MPI from the disk.
            if number:
                times[name].append(seconds)
    medians = {name: statistics.median(found) for name, found in times.items()}
    rows = [
        (name, medians[name], min(times[name]), max(times[name]), medians[name] / medians["gloo"])
        for name in times
    ]
    headers = ["job", "median s", "min s", "max s", "of Gloo's"]
    print(tables.text(rows, headers, floats=".2f"))
    about = {
        "processor": environment.cpu_model(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    record = {"environment": about, "ranks": options.ranks, "seconds": times, "medians": medians}
    report.write_json(record, options.output / f"startup-{options.ranks}.json")


def _parsed() -> argparse.Namespace:
    parser = benchmark_options.parser(__doc__, "quick")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of each job")
    parser.add_argument("--rounds", type=int, default=9, help="jobs of each kind that count")
    return parser.parse_args()


def _commands(ranks: int) -> dict[str, list[str]]:
    here = Path(sys.executable).parent
    mpirun = [str(here / "mpirun"), "--oversubscribe", "-n", str(ranks), sys.executable]
    torchrun = [str(here / "torchrun"), "--standalone", f"--nproc-per-node={ranks}"]
    return {
        "gloo": [*mpirun, str(_JOB), "gloo"],
        "mpidist": [*mpirun, str(_JOB), "mpidist"],
        "gloo, torchrun": [*torchrun, str(_JOB), "gloo"],
    }


def _timed(command: list[str], ranks: int) -> float:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {}
    if command[-1] == "gloo" and not command[0].endswith("torchrun"):
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    kept = {name: value for name, value in os.environ.items() if name != _ENV_NO_BYTECODE}
    start = time.perf_counter()
    done = subprocess.run(
        command,
        env={**kept, **variables},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:4])} ... failed:\n{done.stdout}{done.stderr}")
    return seconds


if __name__ == "__main__":
    main()
