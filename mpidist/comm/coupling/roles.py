"""Plan of a coupled job: the program of each process, and who serves whom (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate


def numbers(groups: Mapping[str, int], size: int) -> list[int]:
    """Return the program's number of each process, programs in the order of ``groups``.

    Args:
        groups: Number of processes of each program; the processes follow each other by rank.
        size: Number of processes.

    Raises:
        ValueError: The numbers of processes are not the job's.
    """
    for name, count in groups.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(
                f"couple needs at least one process for each program; got {count!r} for {name!r}"
            )
    if sum(groups.values()) != size:
        parts = " + ".join(f"{count} for {name!r}" for name, count in groups.items())
        raise ValueError(f"couple got {parts} processes for a job of {size}")
    ends = list(accumulate(groups.values()))
    return [next(k for k, end in enumerate(ends) if rank < end) for rank in range(size)]


def require_names(names: Sequence[str]) -> None:
    """Require names of two programs or more.

    Raises:
        TypeError: A name that is no text.
        ValueError: Fewer than two names, an empty one, or one twice.
    """
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"couple needs names of programs; got {name!r}")
    if len(names) < 2 or "" in names or len(set(names)) != len(names):
        raise ValueError(
            f"couple needs the different names of two programs or more; got {list(names)!r}"
        )


def require_programs(names: Sequence[str], found: Sequence[int]) -> None:
    """Require that each program has processes, and that there are no others.

    Args:
        found: Number of the program of each process.

    Raises:
        ValueError: It is not so.
    """
    if set(found) != set(range(len(names))):
        raise ValueError(
            f"couple got the names {list(names)!r}, but the launcher numbers the programs "
            f"{sorted(set(found))} (MPI_APPNUM); start one program for each name (mpirun -n 2 "
            "simulation : -n 2 python train.py), or give the number of processes of each: "
            "couple({'simulation': 2, 'train': 2})"
        )


def partners(rank: int, size: int, others: int) -> list[int]:
    """Return the processes of another program with which a process exchanges samples.

    Each process of the larger program has one partner, and the partners share them evenly.

    Args:
        rank: Of the process in its program of ``size`` processes.
        others: Number of processes of the other program.
    """
    shared = min(size, others)
    return [other for other in range(others) if other % shared == rank % shared]
