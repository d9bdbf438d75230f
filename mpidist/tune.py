"""``python -m mpidist.tune``: measure all-reduces by size; cache the table.

Start it as the job is started, one rank per GPU: ``srun python -m mpidist.tune`` or ``mpirun -n 4
python -m mpidist.tune``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import date
from typing import NoReturn

import torch

from mpidist import comm, progress_bar
from mpidist.comm.mpi import library, runtime

_SIZES = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and cache it. Collective: over all ranks of the job."""
    prog = "python -m mpidist.tune" if arguments is None else "mpidist tune"
    options = _parser(prog).parse_args(arguments)
    # The jobs that use the table have a CUDA context when MPI starts; without one MPI would choose
    # another path.
    library.load(makes_context=options.device == "cuda")
    group = comm.init()
    where = runtime.device() if options.device == "cuda" else torch.device("cpu")
    lacks = where.type != options.device
    without = [rank for rank, lacking in enumerate(group.all_gather_object(lacks)) if lacking]
    if without:
        _end(
            group.rank,
            f"mpidist.tune needs a CUDA device on each rank, and {len(without)} of {group.size} "
            "have none; --device cpu shows only that it runs",
        )

    def log(line: str) -> None:
        if group.rank == 0:
            print(line, flush=True)

    log(f"all-reduce of fp32 on {group.size} ranks, {where}; medians of {options.rounds} rounds")
    source = f"measured {date.today()}"
    with progress_bar.bar("all-reduces", len(options.sizes), group.rank) as advance:

        def told(line: str) -> None:
            log(line)
            advance()

        table = group.tune(where, options.sizes, options.rounds, source, told)
    for line in table.lines():
        log(line)
    return 0


def _end(rank: int, why: str) -> NoReturn:
    """End this rank; rank 0 prints the reason, which is the same on all ranks."""
    raise SystemExit(why if rank == 0 else 1)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Measure which all-reduce is the fastest at which size, on the ranks of this "
        "job, and keep the table for later jobs.",
    )
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help="cuda: this rank's GPU; cpu: check that all runs, and keep nothing",
    )
    parser.add_argument(
        "--sizes", type=_positive, nargs="+", default=_SIZES, metavar="BYTES", help="of a tensor"
    )
    parser.add_argument("--rounds", type=_positive, default=20, help="calls of each algorithm")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
