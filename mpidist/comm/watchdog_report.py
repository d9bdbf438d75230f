"""Text of the watchdog's report (pure): the late operation, and what each rank is in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mpidist.comm import call_difference
from mpidist.comm.mpi import exited_ranks
from mpidist.comm.op_status import History
from mpidist.comm.watchdog_messages import Answer

if TYPE_CHECKING:
    from mpidist.comm.execution import Execution
    from mpidist.comm.mpi.world import Process

_WIDTH = 100  # of a line
_LONGEST = 300  # of another rank's words


def report(
    group: Execution,
    operation: str,
    problem: str,
    answers: Mapping[int, Answer],
    missing: Sequence[int],
    left: Mapping[int, Mapping[str, History]],
    processes: Sequence[Process],
    collect_s: float,
) -> str:
    """Return the report on a late operation: for each rank its entries, its process and its place.

    Args:
        group: The group of the operation.
        operation: Its name and number.
        problem: The reason of the report.
        answers: By world rank, of the ranks that have answered.
        missing: World ranks that ended without this operation.
        left: Last collectives of the ranks that have ended, by world rank and group.
        processes: By world rank.
        collect_s: Time for which the reporter waited for answers.
    """
    histories = {rank: answer.history for rank, answer in answers.items()}
    histories |= {rank: last[group.key] for rank, last in left.items() if group.key in last}
    lines = [
        f'mpidist: {operation} of group "{group.name}" {problem}. What each rank is in:',
        *_difference(group, histories),
    ]
    for place, rank in enumerate(group.world_ranks):
        label = f"  rank {place}" + (f" (world rank {rank})" if place != rank else "")
        answer, history = answers.get(rank), histories.get(rank, History())
        unknown = "does not know this group (closed, or not made yet)"
        if exited_ranks.have_died((rank,)):
            lines.append(f"{label}: has died")
        elif rank in missing or (answer is None and exited_ranks.among((rank,))):
            lines.append(f"{label}: has exited{_last(group, history, rank in missing)}")
        else:
            lines += _of_rank(label, answer, processes[rank], unknown, collect_s)
    return "\n".join(lines) + "\n"


def ranks_at_timeout(
    reporter: int, answers: Mapping[int, Answer], processes: Sequence[Process], collect_s: float
) -> str:
    """Return what the other ranks are in when a timeout of one rank's own call ends the job.

    Args:
        reporter: World rank with the timeout.
        answers: By world rank, of the ranks that have answered.
        processes: By world rank.
        collect_s: Time for which the reporter waited for answers.
    """
    lines = [f"mpidist: what the other ranks are in, at the timeout of rank {reporter}:"]
    for rank, process in enumerate(processes):
        if rank == reporter and rank not in answers:
            continue
        if exited_ranks.among((rank,)):
            how = "died" if exited_ranks.have_died((rank,)) else "exited"
            lines.append(f"  rank {rank}: has {how}")
        else:
            answer, idle = answers.get(rank), "outside any call of a group"
            lines += _of_rank(f"  rank {rank}", answer, process, idle, collect_s)
    return "\n".join(lines) + "\n"


def _of_rank(
    label: str, answer: Answer | None, process: Process, unknown: str, collect_s: float
) -> list[str]:
    """Return the lines of a rank that lives, as far as is known."""
    where = f"    process {process.pid} on {process.host}"
    if answer is None:
        return [
            f"{label}: no answer within {collect_s:g} s; the process is stopped, dead, or "
            "holds the interpreter",
            where,
        ]
    lines = [f"{label}: {_safe(str(entry))}" for entry in answer.entries] or [f"{label}: {unknown}"]
    if not answer.places:
        return [*lines, where]
    first, *others = map(_safe, answer.places)
    lines += _folded(f"{where}, {first}")
    for place in others:
        lines += _folded(f"    {place}")
    return lines


def _difference(group: Execution, histories: Mapping[int, History]) -> list[str]:
    """Return the line that names the ranks whose calls differ, if any do."""
    places = {rank: place for place, rank in enumerate(group.world_ranks)}
    found = call_difference.first(
        {places[rank]: history for rank, history in histories.items() if rank in places}
    )
    if found is None:
        return []
    number, calls = found
    # All ranks count alike up to the first difference.
    before = group.journal.sequence - number
    where = f" ({before} calls earlier)" if before > 1 else " (the call before)" if before else ""
    return [f"  {_safe(call_difference.sentence(calls))}{where}"]


def _last(group: Execution, history: History, is_missing: bool) -> str:
    """Return what is known of the calls of a rank that has exited."""
    if is_missing and history.sequence < group.journal.sequence:
        return ", and never called this"
    last = history.call(history.sequence)
    return "" if last is None else f"; its last call was {_safe(last.operation)}"


def _folded(line: str) -> list[str]:
    """Return ``thread: place, within place`` as lines of at most 100 columns, if the paths fit."""
    head, colon, rest = line.partition(": ")
    users, comma, inner = rest.partition(", within ")
    lines, last = [], head + colon.rstrip()
    for part in filter(None, (f" {users}", f"{comma}{inner}")):
        if len(last) + len(part) <= _WIDTH:
            last += part
        else:
            lines.append(last)
            last = f"      {part.lstrip(', ')}"
    return [*lines, last]


def _safe(text: str) -> str:
    """Return another rank's words as one line that a terminal prints."""
    text = text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
    return "".join(char if char.isprintable() else "?" for char in text)
