"""Text of the watchdog's report (pure): the late operation, and what each rank is in."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mpidist.comm.execution.op_status import History
from mpidist.comm.mpi import exited_ranks, job_folder
from mpidist.comm.watchdog import (
    call_difference,
    last_operations,
    process_state,
    rank_states,
)
from mpidist.comm.watchdog.rank_states import RankState
from mpidist.comm.watchdog.watchdog_messages import Answer

if TYPE_CHECKING:
    from mpidist.comm.execution.group_state import GroupState
    from mpidist.comm.mpi.world import Process


class Report(NamedTuple):
    """Text of a report.

    Attributes:
        text: Its lines.
        named: Ranks of the group whose processes it names.
    """

    text: str
    named: tuple[int, ...]


def report(
    group: GroupState,
    operation: str,
    problem: str,
    answers: Mapping[int, Answer],
    missing: Sequence[int],
    left: Mapping[int, Mapping[str, History]],
    processes: Sequence[Process],
    collect_s: float,
) -> Report:
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
    host = socket.gethostname()
    histories = {rank: answer.history for rank, answer in answers.items()}
    histories |= {rank: last[group.key] for rank, last in left.items() if group.key in last}
    states = []
    for rank, world_rank in enumerate(group.world_ranks):
        answer, history = answers.get(world_rank), histories.get(world_rank, History())
        unknown = "does not know this group (closed, or not made yet)"
        if exited_ranks.have_died((world_rank,)):
            state = RankState(rank, world_rank, _of_dead(processes[world_rank], host))
        elif world_rank in missing or (answer is None and exited_ranks.among((world_rank,))):
            last = _last(group, history, world_rank in missing)
            state = RankState(rank, world_rank, f"has exited{last}")
        else:
            state = _living(rank, world_rank, answer, processes, unknown, collect_s, host)
        states.append(state)
    listed, named = rank_states.listing(states)
    lines = [
        f'mpidist: {operation} of group "{group.name}" {problem}. What each rank is in:',
        *_difference(group, histories),
        *listed,
        *_last_operations(answers, _awaited(group, histories), processes),
    ]
    return Report("\n".join(lines) + "\n", named)


def ranks_at_timeout(
    reporter: int, answers: Mapping[int, Answer], processes: Sequence[Process], collect_s: float
) -> Report:
    """Return what the other ranks are in when a timeout of one rank's own call ends the job.

    Args:
        reporter: World rank with the timeout.
        answers: By world rank, of the ranks that have answered.
        processes: By world rank.
        collect_s: Time for which the reporter waited for answers.
    """
    host = socket.gethostname()
    states = []
    for rank in range(len(processes)):
        if rank == reporter and rank not in answers:
            continue
        if exited_ranks.among((rank,)):
            has_died = exited_ranks.have_died((rank,))
            words = _of_dead(processes[rank], host) if has_died else "has exited"
            states.append(RankState(rank, rank, words))
        else:
            idle = "outside any call of a group"
            answer = answers.get(rank)
            states.append(_living(rank, rank, answer, processes, idle, collect_s, host))
    listed, named = rank_states.listing(states)
    title = f"mpidist: what the ranks are in, at the timeout of rank {reporter}:"
    last = _last_operations(answers, (), processes)
    return Report("\n".join([title, *listed, *last]) + "\n", named)


def how_to_read(job: str, file: Path | None) -> str:
    """Return the line of a report that names the command for more; empty without a recording.

    Args:
        job: Name of the job.
        file: Of this process's recorder.
    """
    if file is None:
        return ""
    named = job if file.parent == job_folder.path_of(job) else f"--folder {file.parent}"
    return f"  all last operations and stacks, on each node: mpidist report {named}\n"


def _living(
    rank: int,
    world_rank: int,
    answer: Answer | None,
    processes: Sequence[Process],
    unknown: str,
    collect_s: float,
    host: str,
) -> RankState:
    """Return the state of a rank that lives, as far as is known."""
    process = processes[world_rank]
    if answer is None:
        unknown = "the process is stopped, dead, or holds the interpreter"
        known = process_state.words(process, host) or unknown
        words = f"no answer within {collect_s:g} s; {known}"
        return RankState(rank, world_rank, words, process)
    return RankState(
        rank, world_rank, unknown, process, tuple(answer.entries), tuple(answer.places)
    )


def _of_dead(process: Process, host: str) -> str:
    """Return the words on a rank that MPI knows to be dead."""
    # Of processes on this host the kernel may still have the signal.
    known = process_state.words(process, host)
    signal = f": {known}" if known.startswith("it was killed") else ""
    return f"has died{signal} (process {process.pid} on {process.host})"


def _difference(group: GroupState, histories: Mapping[int, History]) -> list[str]:
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
    return [f"  {rank_states.safe(call_difference.sentence(calls))}{where}"]


def _last_operations(
    answers: Mapping[int, Answer], awaited: Sequence[int], processes: Sequence[Process]
) -> list[str]:
    """Return the lines on calls under way, and on the last operations of ranks."""
    last = {
        rank: last_operations.of_silent(rank, processes[rank])
        for rank in awaited
        if rank not in answers
    }
    last |= {rank: answer.last for rank, answer in answers.items()}
    return [rank_states.safe(line) for line in last_operations.lines(last, awaited)]


def _awaited(group: GroupState, histories: Mapping[int, History]) -> list[int]:
    """Return the world ranks that have not called what the others are in, or do not say it."""
    return [
        rank
        for rank in group.world_ranks
        if histories.get(rank, History()).sequence < group.journal.sequence
    ]


def _last(group: GroupState, history: History, is_missing: bool) -> str:
    """Return what is known of the calls of a rank that has exited."""
    if is_missing and history.sequence < group.journal.sequence:
        return ", and never called this"
    last = history.call(history.sequence)
    return "" if last is None else f"; its last call was {rank_states.safe(last.operation)}"
