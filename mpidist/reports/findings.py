"""Findings about a job (pure): what most likely keeps it, the most important first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import NamedTuple

from mpidist.comm.mpi import rank_ranges
from mpidist.comm.recorder.recording import Ended, Kind
from mpidist.comm.watchdog import call_waits, thread_places
from mpidist.comm.watchdog.call_waits import Chain
from mpidist.comm.watchdog.last_operations import described, duration
from mpidist.comm.watchdog.thread_stacks import Line
from mpidist.reports import collectives
from mpidist.reports.collectives import Difference, Late
from mpidist.reports.job import ENDED, STOPPED, Job

_MOST = 4  # findings of one kind
_STUCK_S = 1.0  # a call of a living job that takes less is none to name
# At the timeout of one call others of its circle may be over, too, and a lock is given up.
_BEFORE_TIMEOUT_NS = 500_000_000
_PAST_S = 60.0  # a job that has gone on for longer is past its timeout
# Ends that another rank, or a person, has caused: the finding is what these ranks waited for. ""
# stands for an end by mpidist, as of a call past its timeout.
_EFFECTS = ("", "CommTimeout", "RankFailureError", "KeyboardInterrupt")
_LONGEST = 400  # of an exception's text


class Finding(NamedTuple):
    """One finding.

    Attributes:
        remedy: Advice.
        text: The finding.
        details: Further lines.
    """

    remedy: str
    text: str
    details: tuple[str, ...] = ()


def findings(job: Job) -> list[Finding]:
    """Return what keeps a job, or had kept it at its end."""
    late, chains = collectives.late(job.recordings), _chains(job)
    different = collectives.differences(job.recordings)
    ends = _ends(job)
    causes = [ranks for (type_name, _), ranks in ends.items() if type_name not in _EFFECTS]
    ended = {rank for ranks in causes for rank in ranks}
    found = [
        *_processes(job),
        *(_different(one) for one in different[:_MOST]),
        *(_calls(job, chain) for chain in chains if chain.circle),
        # The calls within the one that has timed out may still wait.
        *(() if any(chain.circle for chain in chains) else _circles_of_the_past(job)),
        *(_ended(job, ranks) for ranks in causes[:_MOST]),
        *(_missing(job, one) for one in late[:_MOST] if not ended.issuperset(one.missing)),
        *(_calls(job, chain) for chain in chains if not chain.circle),
        *_messages(job),
        *(_not_known(job, one) for one in late[:1] if one.forgotten and not one.missing),
        # Ranks that wait in different calls have not all come, and no transfer is under way.
        *(
            _entered_by_all(job, one)
            for one in late[:1]
            if not (one.missing or one.unknown or one.forgotten)
            and not any(collectives.follows(one, other) for other in different)
        ),
    ]
    return found or [_ended(job, ranks) for ranks in list(ends.values())[:_MOST]]


def _ends(job: Job) -> dict[tuple[str, str], list[int]]:
    """Return the ranks that have told what ended them, by its type and place."""
    found: dict[tuple[str, str], list[int]] = {}
    for rank, recording in sorted(job.recordings.items()):
        if (end := recording.ended) is not None:
            found.setdefault((end.type_name, _place(end)), []).append(rank)
    return found


def _ended(job: Job, ranks: Sequence[int]) -> Finding:
    end = job.recordings[ranks[0]].ended
    assert end is not None
    text = end.text if len(end.text) <= _LONGEST else f"{end.text[:_LONGEST]}..."
    lines = f", each line with [rank {ranks[0]}] in front" if job.first.size > 1 else ""
    return Finding(
        f"read the traceback in the job's output{lines}"
        if end.type_name
        else "read the job's output before that",
        f"{rank_ranges.named(ranks)} {_verb(end)}: {text}",
    )


def _verb(end: Ended) -> str:
    return f"raised {end.type_name}{_place(end)}" if end.type_name else "ended the job"


def _place(end: Ended) -> str:
    """Return the place in the user's program; the traceback has the others."""
    lines = [Line(*frame) for frame in end.frames]
    return f" at {thread_places.described(lines).partition(', within ')[0]}" if lines else ""


def _processes(job: Job) -> Iterator[Finding]:
    if not job.is_alive:
        return
    if stopped := job.with_state(STOPPED):
        pids = " ".join(str(job.recordings[rank].pid) for rank in stopped)
        yield Finding(
            f"kill -CONT {pids}, or end the debugger that holds the process",
            f"{rank_ranges.named(stopped)} {_is(stopped)} stopped",
            _in(job, stopped),
        )
    states = job.with_state(ENDED)
    if ended := tuple(rank for rank in states if job.recordings[rank].ended is None):
        yield Finding(
            "dmesg and the launcher's last lines say what ended a process: a full memory, a person",
            f"{rank_ranges.named(ended)} {_has(ended)} ended, and others of the job have not",
            _in(job, ended),
        )


def _different(difference: Difference) -> Finding:
    *others, usual = collectives.sentence(difference)
    called = [f"{rank_ranges.named(ranks)} called {text}" for ranks, text in others]
    order = "; the next one is the other way round" if difference.is_order else ""
    return Finding(
        "all ranks of a group call the same collectives in the same order, with tensors of one "
        "size; MPIDIST_DEBUG=1 raises at the first difference, with the line",
        f"{', '.join(called)} where {rank_ranges.named(usual[0])} called {usual[1]}, as number "
        f'{difference.sequence} of group "{difference.group}"{order}',
    )


def _missing(job: Job, late: Late) -> Finding:
    look = (
        f"look at what {rank_ranges.named(late.missing)} "
        f"{'is in, and its' if len(late.missing) == 1 else 'are in, and their'} stack"
    )
    # A signal leaves no word of what has ended the job; a rank that was only late leaves none, too.
    if (
        not job.is_alive
        and {job.states.get(rank) for rank in late.missing} == {ENDED}
        and all(recording.ended is None for recording in job.recordings.values())
    ):
        look = (
            "see whether the launcher's last lines name a signal for it: 9 (Killed) is a full "
            f"memory (dmesg; sacct -o State,MaxRSS -j JOB) or a person. If none, {look}"
        )
    return Finding(
        look,
        f"{rank_ranges.named(late.missing)} {_has(late.missing)} not called {_waited(job, late)}"
        + (f"; of {rank_ranges.named(late.unknown)} there is no file" if late.unknown else "")
        + (f"; of {rank_ranges.named(late.forgotten)} it is not known" if late.forgotten else ""),
        _in(job, late.missing),
    )


def _not_known(job: Job, late: Late) -> Finding:
    return Finding(
        "look at what these ranks are in; a larger MPIDIST_RECORDER keeps more entries",
        f"it is not known whether {rank_ranges.named(late.forgotten)} {_has(late.forgotten)} "
        f"called {_waited(job, late)}: the recording has later entries alone",
        _in(job, late.forgotten),
    )


def _waited(job: Job, late: Late) -> str:
    """Return the collective, and the ranks that are in it."""
    ranks = sorted(late.inside)
    age = max(job.age_s(rank, entry.begin_ns) for rank, entry in late.inside.items())
    return (
        f'{late.inside[ranks[0]].operation} number {late.sequence} of group "{late.group}", which '
        f"{rank_ranges.named(ranks)} {_is(ranks)} in for {duration(age)}"
    )


def _entered_by_all(job: Job, late: Late) -> Finding:
    ranks = sorted(late.inside)
    age = max(job.age_s(rank, entry.begin_ns) for rank, entry in late.inside.items())
    return Finding(
        "a transfer is under way, or the network does not carry it",
        f"{rank_ranges.named(ranks)} {_is(ranks)} in {late.inside[ranks[0]].operation} number "
        f'{late.sequence} of group "{late.group}" for {duration(age)}, and all others have come',
    )


def _chains(job: Job) -> list[Chain]:
    """Return the chains of calls, circles first; of those that say the same the first."""
    found: dict[object, Chain] = {}
    for chain in call_waits.chains(job.under_way, job.locks):
        ages = (job.age_s(rank, call.begin_ns) for rank, call, _ in chain.steps)
        if job.is_alive and min(ages) < _STUCK_S:
            continue
        # Each call of a circle may begin a chain of its own, and threads may wait alike.
        operations = (step.call.operation for step in chain.steps)
        found.setdefault(frozenset(chain.circle) or (*chain.ranks, *operations), chain)
    return list(found.values())[:_MOST]


def _calls(job: Job, chain: Chain) -> Finding:
    names = job.workers
    lines = tuple(call_waits.sentences(chain, names, job.now_ns))
    if not chain.circle:
        return Finding(
            "look at the handler's stack",
            f"a call waits for its answer: {call_waits.arrows(chain.ranks, names)}",
            lines,
        )
    return Finding(
        "give up the lock before the call, or make the call without waiting (rpc_async)"
        if chain.lock
        else "a handler that calls back must not wait for what its caller holds",
        f"calls wait for each other: {call_waits.arrows(chain.circle, names)}",
        lines,
    )


def _circles_of_the_past(job: Job) -> Iterator[Finding]:
    """Yield the circle of calls that a timeout has broken, of the last calls that failed."""
    failed = [
        (job.wall_ns(rank, entry.end_ns), rank, entry)
        for rank, recording in job.recordings.items()
        for entry in recording.entries
        if entry.kind is Kind.CALL
        and entry.failed
        and entry.end_ns is not None
        and entry.end_ns - entry.begin_ns >= _STUCK_S * 1e9
        and job.age_s(rank, entry.end_ns) < _PAST_S
    ]
    for _, rank, call in sorted(failed, key=lambda each: each[0], reverse=True)[:_MOST]:
        at_ns = (call.end_ns or 0) - _BEFORE_TIMEOUT_NS
        for chain in call_waits.chains(job.under_way_at(rank, at_ns)):
            if chain.circle:
                then_ns = {each: job.same_time_ns(rank, at_ns, each) for each in job.recordings}
                yield Finding(
                    "a handler that calls back must not wait for what its caller holds: a lock is "
                    "given up before the call, or the call is made without waiting (rpc_async)",
                    "calls waited for each other until a timeout: "
                    + call_waits.arrows(chain.circle, job.workers),
                    tuple(call_waits.sentences(chain, job.workers, then_ns)),
                )
                return


def _messages(job: Job) -> Iterator[Finding]:
    """Yield the circle of ranks that wait for messages of each other, and nothing else."""
    waits = {
        rank: entries[-1]
        for rank, entries in job.under_way.items()
        if entries and entries[-1].kind in (Kind.SEND, Kind.RECEIVE) and entries[-1].peer >= 0
    }
    for rank in sorted(waits):
        path = [rank]
        while path[-1] in waits and (peer := waits[path[-1]].peer) not in path:
            path.append(peer)
        if path[-1] in waits and waits[path[-1]].peer == rank and len(path) > 1:
            yield Finding(
                "one of them sends first, or all send without waiting (isend)",
                "ranks wait for messages of each other: " + call_waits.arrows((*path, rank), {}),
                tuple(f"rank {each}: {described(waits[each])}" for each in path),
            )
            return


def _in(job: Job, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """Return what each of these ranks is in, or what it did last."""
    return tuple(
        f"rank {rank}: {words(job, rank)}{_at(job, rank)}{_end(job, rank)}"
        for rank in ranks[:_MOST]
    )


def _at(job: Job, rank: int) -> str:
    """Return the place of a rank's main thread, if its stack is known."""
    stacks = job.stacks.get(rank, ())
    lines = next((stack.lines for stack in stacks if stack.name == "MainThread"), ())
    return f"; at {thread_places.described(lines)}" if lines else ""


def _end(job: Job, rank: int) -> str:
    end = job.recordings[rank].ended
    return "" if end is None else f"; it {_verb(end)}"


def words(job: Job, rank: int) -> str:
    """Return what a rank is in, or what it did last."""
    inside = job.innermost(rank)
    if inside:
        return "in " + "; in ".join(
            f"{described(entry)} for {duration(job.age_s(rank, entry.begin_ns))}"
            for entry in inside[:_MOST]
        )
    last = job.last(rank)
    if last is None:
        return "nothing was recorded"
    age, verb = duration(job.age_s(rank, last.end_ns or 0)), "failed" if last.failed else "ended"
    return f"in none; {described(last)} {verb} {age} ago"


def _is(ranks: Sized) -> str:
    return "is" if len(ranks) == 1 else "are"


def _has(ranks: Sized) -> str:
    return "has" if len(ranks) == 1 else "have"
