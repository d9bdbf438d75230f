"""One thread per process that notices an operation that cannot end in time, and says what every rank is doing.

It talks to the other ranks' watchdogs on a communicator of its own, with messages that nobody has to wait for:

1. A collective has run for longer than its group's timeout, or for 2 s without a member whose process has come to its end: ask
   all members what they are in, and collect answers for 1 s.
2. The lowest member that is late prints the report on stderr; all late members fail the group with it.
3. Revoke the group's communicator, if MPI has ULFM: calls under way return with an error, and the job may go on.
4. Is the call not back 2 s later, end the job. Revoking frees no large transfer whose peer stays outside MPI, and MPI without
   ULFM has no way to free any call: a hang that cannot be undone must not burn the allocation.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Any

from mpidist.comm import departures, faults, frame, runtime
from mpidist.comm.execution import Execution
from mpidist.comm.journal import Entry
from mpidist.comm.library import MPI
from mpidist.errors import CommTimeout, RankFailureError

_POLL_S = 0.1  # how often it looks; also how long a question may lie unanswered
_COLLECT_S = 1.0  # how long it waits for the others' answers
_ABORT_S = 2.0  # from the report to the end of the job
_TAG = 1
_ASK, _ANSWER, _LEFT = "ask", "answer", "left"

_lock = threading.Lock()
_watchdog: Watchdog | None = None


def watch(group: Execution) -> None:
    """Have a group watched from now on; only weakly referenced.

    Collective: the first call of a process, over the world, because the watchdogs get a communicator.
    """
    global _watchdog
    world = runtime.world()
    with _lock:
        if _watchdog is None or _watchdog.world is not world:
            _watchdog = Watchdog(world)
        _watchdog.groups.add(group)


class Watchdog:
    """The thread and its communicator."""

    def __init__(self, world: runtime.World) -> None:
        self.world = world
        self.groups: weakref.WeakSet[Execution] = weakref.WeakSet()
        self._mpi = world.comm.Dup()
        self._sends: list[tuple[Any, bytes]] = []
        self._answers: dict[int, list[Entry]] = {}
        self._left: dict[int, dict[str, int]] = {}  # world ranks that came to their end: their last collective of each group
        self._round = 0
        self._reported: weakref.WeakKeyDictionary[Execution, tuple[int, float, str]] = weakref.WeakKeyDictionary()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if world.size > 1:
            self._thread = threading.Thread(target=runtime.guard_thread(self._run), name="mpidist-watchdog", daemon=True)
            self._thread.start()
            runtime.close_at_exit(self, stage=1)

    def close(self, timeout_s: float) -> None:
        """Stop the thread, and tell the others that this process takes part in nothing any more."""
        self._stop.set()
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        last = {group.key: group.journal.sequence for group in list(self.groups) if not group.is_closed}
        for rank in range(self.world.size):
            if rank != self.world.rank:
                self._send(rank, (_LEFT, 0, last))

    def _run(self) -> None:
        while not self._stop.wait(_POLL_S):
            self._serve()
            for group in list(self.groups):
                self._look_at(group)

    def _look_at(self, group: Execution) -> None:
        limit = group.timeout_s
        if limit is not None and group.journal.creation_age() > limit:
            self._ask(group)
            problem = f"is past its timeout of {limit:g} s"
            runtime.abort(_describe(group, "new_group", problem, limit, self._answers, [], self.world.rank)[0])
        if self._missing(group):
            limit = departures.GRACE_S if limit is None else min(limit, departures.GRACE_S)
        age = group.journal.observe()
        if limit is None or age <= limit:
            self._reported.pop(group, None)
            return
        told = self._reported.get(group)
        if told is None or told[0] != group.journal.sequence:
            self._report(group, limit)
        elif time.monotonic() - told[1] > _ABORT_S:
            what = f'{group.journal.operation} of group "{group.name}"'
            runtime.abort(f"{what} did not come back within {_ABORT_S:g} s of this report\n{told[2]}")

    def _missing(self, group: Execution) -> list[int]:
        """Return the members that have left and did not take part in the group's present collective."""
        sequence = group.journal.sequence
        # A group that such a rank had closed is not in its list: whatever it had to do there was done.
        return [rank for rank in group.world_ranks if rank in self._left and self._left[rank].get(group.key, sequence) < sequence]

    def _report(self, group: Execution, limit_s: float) -> None:
        sequence = group.journal.sequence
        self._ask(group)
        missing = self._missing(group)
        what = f"{group.journal.operation} number {group.journal.sequence}"
        problem = "waits for a rank that has left" if missing else f"is past its timeout of {limit_s:g} s"
        text, lowest = _describe(group, what, problem, limit_s, self._answers, missing, self.world.rank)
        if group.journal.observe() <= limit_s:
            return  # it ended while the answers came in
        if lowest == self.world.rank:
            runtime.write_stderr(text)
        group.fail(RankFailureError(text.rstrip(), missing) if missing else CommTimeout(text.rstrip()))
        group.revoke()
        self._reported[group] = (sequence, time.monotonic(), text)

    def _ask(self, group: Execution) -> None:
        self._round += 1
        self._answers = {self.world.rank: group.journal.snapshot()}
        others = [rank for rank in group.world_ranks if rank != self.world.rank and rank not in self._left]
        for rank in others:
            self._send(rank, (_ASK, self._round, group.key))
        deadline = time.monotonic() + _COLLECT_S
        while len(self._answers) <= len(others) and time.monotonic() < deadline:
            self._serve()
            time.sleep(1e-3)

    def _serve(self) -> None:
        status = MPI.Status()
        while (message := faults.matched_probe(self._mpi, _TAG, status)) is not None:
            data = bytearray(status.Get_count(MPI.BYTE))
            source = status.Get_source()
            message.Recv((data, len(data), MPI.BYTE))
            kind, number, content = frame.from_bytes(data)
            if kind == _ASK:
                self._send(source, (_ANSWER, number, self._doings(content)))
            elif kind == _LEFT:
                self._left[source] = content
                departures.note(source)
            elif number == self._round:
                self._answers[source] = content
        self._sends = [(request, data) for request, data in self._sends if not faults.is_over(request)]

    def _doings(self, key: str) -> list[Entry]:
        # Of the group asked about, and of any other in which this rank is inside a call: that is where a hang usually lies.
        entries = []
        for group in list(self.groups):
            told = group.journal.snapshot()
            entries += told if group.key == key else [entry for entry in told if entry.seconds is not None]
        return entries

    def _send(self, rank: int, content: tuple[str, int, Any]) -> None:
        data = bytes(frame.to_bytes(content))
        with faults.death_tolerated():
            self._sends.append((self._mpi.Isend((data, len(data), MPI.BYTE), rank, _TAG), data))


def _describe(
    group: Execution, what: str, problem: str, limit_s: float, answers: dict[int, list[Entry]], missing: list[int], me: int
) -> tuple[str, int]:
    """Write the report; also return the lowest world rank that is late, who prints it."""
    lines = [
        f'mpidist: {what} of group "{group.name}" {problem}. What each rank is in (process {os.getpid()} of rank {me} reports):'
    ]
    late = [me]
    for place, rank in enumerate(group.world_ranks):
        label = f"  rank {place}" + (f" (world rank {rank})" if place != rank else "")
        entries = answers.get(rank)
        if rank in missing:
            lines.append(f"{label}: has come to the end of its program, and never called this")
            continue
        if entries is None:
            lines.append(f"{label}: no answer within {_COLLECT_S:g} s; the process is stopped, dead, or holds the interpreter")
            continue
        lines += [f"{label}: {entry}" for entry in entries] or [f"{label}: does not know this group (closed, or not made yet)"]
        if any(e.key == group.key and e.seconds is not None and e.seconds > limit_s for e in entries):
            late.append(rank)
    return "\n".join(lines) + "\n", min(late)
