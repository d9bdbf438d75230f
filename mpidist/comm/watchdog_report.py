"""Text of the watchdog's report (pure): the late operation, and the operations of each rank."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mpidist.comm.mpi import exited_ranks
from mpidist.comm.op_status import Entry

if TYPE_CHECKING:
    from mpidist.comm.execution import Execution


def report(
    group: Execution,
    operation: str,
    problem: str,
    answers: Mapping[int, Sequence[Entry]],
    missing: Sequence[int],
    reporter: int,
    collect_s: float,
) -> str:
    """Return the report on a late operation, one line for each entry of a rank.

    Args:
        group: The group of the operation.
        operation: Its name and number.
        problem: The reason of the report.
        answers: Entries by world rank, of the ranks that have answered.
        missing: World ranks that ended without this operation.
        reporter: World rank that writes the report.
        collect_s: Time for which the reporter waited for answers.
    """
    lines = [
        f'mpidist: {operation} of group "{group.name}" {problem}. What each rank is in (process '
        f"{os.getpid()} of rank {reporter} reports):"
    ]
    for place, rank in enumerate(group.world_ranks):
        label = f"  rank {place}" + (f" (world rank {rank})" if place != rank else "")
        entries = answers.get(rank)
        if exited_ranks.have_died((rank,)):
            lines.append(f"{label}: has died")
        elif rank in missing:
            lines.append(f"{label}: has exited, and never called this")
        elif entries is None and exited_ranks.among((rank,)):
            lines.append(f"{label}: has exited")
        elif entries is None:
            lines.append(
                f"{label}: no answer within {collect_s:g} s; the process is stopped, dead, or "
                "holds the interpreter"
            )
        else:
            lines += [f"{label}: {entry}" for entry in entries] or [
                f"{label}: does not know this group (closed, or not made yet)"
            ]
    return "\n".join(lines) + "\n"
