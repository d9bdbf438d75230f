"""Last operations of a rank, as the answer to another rank's watchdog carries them.

Times are relative to the moment of the answer, because each node has a clock of its own.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Any

from mpidist.comm.mpi.world import Process
from mpidist.comm.recorder import recorder
from mpidist.comm.recorder.file_format import WORKER
from mpidist.comm.recorder.recording import Entry, Kind, Recording, read
from mpidist.comm.watchdog import call_waits, thread_places
from mpidist.comm.watchdog.call_waits import Thread
from mpidist.errors import RecordingError

_LAST = 5  # operations that have ended
_UNDER_WAY = 32
_MOST = 3  # ranks whose last operations a report has, and chains of calls
_KINDS = frozenset(map(str, Kind))
_PREPOSITIONS = {
    Kind.SEND: "to",
    Kind.RECEIVE: "from",
    Kind.CALL: "on",
    Kind.HANDLER: "for",
}


@dataclass(frozen=True)
class LastOperations:
    """What a rank's recorder has of its last operations.

    Attributes:
        entries: Those under way, and the last that have ended, by their numbers; their times are
            in ns before the answer, and so negative.
        locks: By the number of each thread: the place of the lock it waits for, or "".
        worker: The rank's name as a worker of RPC; "" if it is none.
    """

    entries: tuple[Entry, ...] = ()
    locks: Mapping[int, str] = field(default_factory=dict)
    worker: str = ""

    @property
    def under_way(self) -> list[Entry]:
        """Return the entries that have not ended."""
        return [entry for entry in self.entries if entry.end_ns is None]


def own() -> LastOperations:
    """Return those of this process; none if its recorder has no file."""
    path = recorder.of_process().path
    if path is None:
        return LastOperations()
    try:
        return of(read(path), time.monotonic_ns(), thread_places.locks())
    except (RecordingError, OSError):
        return LastOperations()


def of_silent(rank: int, process: Process) -> LastOperations:
    """Return those of a rank that does not answer, from its file if it is on this node."""
    path = recorder.of_process().path
    if path is None or process.host != socket.gethostname():
        return LastOperations()
    try:
        recording = read(path.with_name(f"recorder-{rank}"))
    except (RecordingError, OSError):
        return LastOperations()
    # The file is named by the rank among all processes of the job.
    if recording.pid != process.pid:
        return LastOperations()
    return of(recording, time.monotonic_ns(), {})


def worker_of(recording: Recording) -> str:
    """Return the name of a process as a worker of RPC; "" if it is none."""
    names = [label for label, key in recording.keys.items() if key == WORKER]
    return names[-1] if names else ""


def of(recording: Recording, now_ns: int, locks: Mapping[int, str]) -> LastOperations:
    """Return the last operations of a recording.

    Args:
        now_ns: ``time.monotonic_ns``.
        locks: See ``LastOperations``; those of threads that are in an operation are kept.
    """
    under_way = [entry for entry in recording.entries if entry.end_ns is None][-_UNDER_WAY:]
    ended = [entry for entry in recording.entries if entry.end_ns is not None][-_LAST:]
    threads = {entry.thread for entry in under_way}
    return LastOperations(
        tuple(
            replace(
                entry,
                begin_ns=entry.begin_ns - now_ns,
                end_ns=None if entry.end_ns is None else entry.end_ns - now_ns,
            )
            for entry in sorted((*under_way, *ended), key=lambda entry: entry.number)
        ),
        {thread: place for thread, place in locks.items() if thread in threads},
        worker_of(recording),
    )


def plain(last: LastOperations) -> tuple[list[tuple[object, ...]], dict[int, str], str]:
    """Return plain data for a message."""
    rows: list[tuple[object, ...]] = []
    for entry in last.entries:
        number, kind, *others = astuple(entry)
        rows.append((number, str(kind), *others))
    return rows, dict(last.locks), last.worker


def is_plain(value: object) -> bool:
    """Return whether a value is a result of ``plain``."""
    if type(value) is not tuple or tuple(map(type, value)) != (list, dict, str):
        return False
    rows, locks, _ = value
    return all(map(_is_row, rows)) and all(
        type(thread) is int and type(place) is str for thread, place in locks.items()
    )


def from_plain(value: tuple[Any, ...]) -> LastOperations:
    """Return what ``plain`` was given."""
    rows, locks, worker = value
    return LastOperations(
        tuple(Entry(row[0], Kind(row[1]), *row[2:]) for row in rows), locks, worker
    )


def lines(last: Mapping[int, LastOperations], ranks: Sequence[int]) -> list[str]:
    """Return a report's lines: circles of calls, other calls under way, and last operations.

    Args:
        last: By world rank.
        ranks: World ranks that others wait for.
    """
    names = {rank: each.worker for rank, each in last.items() if each.worker}
    locks: dict[Thread, str] = {
        (rank, thread): place for rank, each in last.items() for thread, place in each.locks.items()
    }
    said: list[str] = []
    seen: set[object] = set()
    now_ns = dict.fromkeys(last, 0)
    for chain in call_waits.chains({rank: each.under_way for rank, each in last.items()}, locks):
        # Each call of a circle begins a chain.
        key = frozenset(chain.circle) or chain.ranks
        if key in seen or len(seen) == _MOST:
            continue
        seen.add(key)
        title = "calls wait for each other" if chain.circle else "a call waits"
        said.append(f"  {title}: {call_waits.arrows(chain.circle or chain.ranks, names)}")
        said += [f"    {line}" for line in call_waits.sentences(chain, names, now_ns)]
    for rank in [rank for rank in ranks if rank in last and last[rank].entries][:_MOST]:
        said.append(f"  last operations of rank {rank}:")
        # Without numbers: the report's count the program's calls, those of a recorder all.
        said += [
            f"    {described(entry, has_number=False)}: {_when(entry)}"
            for entry in last[rank].entries[-_LAST:]
        ]
    return said


def described(entry: Entry, *, has_number: bool = True) -> str:
    """Return an operation in words: its name, number and group or other side, and its tensor."""
    words = [f"handler of {entry.operation}" if entry.kind is Kind.HANDLER else entry.operation]
    if entry.sequence and has_number:
        words.append(f"number {entry.sequence}")
    if entry.group and entry.kind is Kind.COLLECTIVE:
        words.append(f'of "{entry.group}"')
    if entry.peer >= 0:
        words.append(f"{_PREPOSITIONS.get(entry.kind, 'with')} rank {entry.peer}")
    if entry.kind in (Kind.SEND, Kind.RECEIVE):
        words.append(f"tag {entry.tag}")
    return " ".join([*words, *_tensor(entry)])


def form(entry: Entry) -> str:
    """Return ``all_reduce (5,) float32``; the name alone of what has no tensor."""
    return " ".join([entry.operation, *_tensor(entry)])


def duration(seconds: float) -> str:
    """Return a time with three digits."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{max(seconds, 0) * 1e6:.0f} us"


def _tensor(entry: Entry) -> list[str]:
    return [str(entry.shape), entry.dtype] if entry.dtype else []


def _when(entry: Entry) -> str:
    if entry.end_ns is None:
        return f"under way for {duration(-entry.begin_ns / 1e9)}"
    failed = "failed" if entry.failed else "ended"
    return f"{failed} {duration(-entry.end_ns / 1e9)} ago"


def _is_row(row: object) -> bool:
    if type(row) is not tuple or len(row) != len(fields(Entry)):
        return False
    number, kind, operation, group, sequence, dtype, shape, *rest = row
    *integers, end_ns, failed = rest
    return (
        type(kind) is str
        and kind in _KINDS
        and all(type(text) is str for text in (operation, group, dtype))
        and type(shape) is tuple
        and all(type(value) is int for value in (number, sequence, *shape, *integers))
        and type(end_ns) in (int, type(None))
        and type(failed) is bool
    )
