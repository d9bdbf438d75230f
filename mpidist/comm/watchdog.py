"""One thread per process that notices an operation that cannot end in time, and reports what every rank is doing.

It talks to the other ranks' watchdogs on a communicator of its own, with messages that nobody has
to wait for:

1. A collective has run for longer than its group's timeout, or for 2 s without a member whose
   process has come to its end: ask all members what they are in, and collect answers for 1 s.
2. One of the late members prints the report on stderr: the lowest of those that asked first. Each
   question names the printer as far as the asker knows, and the others print only if they do not
   learn in time that it has.
3. All late members fail the group with the report. A group that raises on a timeout fails on all
   other members as well, and the threads that wait in it leave their calls.
4. Revoke the group's communicator, if MPI has ULFM: calls under way return with an error, and the
   job may go on.
5. Is the call not back 2 s later, end the job. Revoking frees no large transfer whose peer stays
   outside MPI, and a blocking call of MPI cannot be left: a hang that cannot be undone must not
   burn the allocation.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from mpidist.comm import watchdog_messages
from mpidist.comm.execution import Execution
from mpidist.comm.group_failure import RAISE
from mpidist.comm.mpi import exited_ranks, mpi_errors, runtime
from mpidist.comm.mpi.library import MPI
from mpidist.comm.op_status import Entry
from mpidist.comm.watchdog_messages import ANSWER, ASK, FAILED, LEFT, PRINTED, Subject
from mpidist.errors import CommTimeout, FrameError, RankFailureError

_POLL_S = 0.1  # how often it looks; also how long a question may lie unanswered
_COLLECT_S = 1.0  # how long it waits for the others' answers
_PRINTED_S = 0.5  # how much longer it waits for the word that another rank has printed the report
_ABORT_S = 2.0  # from the report to the end of the job
_SILENT_S = 10.0  # who does not answer for this long is stopped or dead
# how long a rank that left a call of MPI waits at its end for others that answer
_LONGEST_END_S = 300.0
_TAG = 1

_log = logging.getLogger(__name__)

_lock = threading.Lock()
_watchdog: Watchdog | None = None


def start(world: runtime.World) -> None:
    """Start the thread.

    Collective: over the world, because the watchdogs get a communicator.
    """
    global _watchdog
    with _lock:
        if _watchdog is None or _watchdog.world is not world:
            _watchdog = Watchdog(world)


def watch(group: Execution) -> None:
    """Have a group watched from now on; only weakly referenced."""
    start(runtime.world())
    assert _watchdog is not None
    _watchdog.groups.add(group)


class Watchdog:
    """The thread and its communicator."""

    def __init__(self, world: runtime.World) -> None:
        self.world = world
        self.groups: weakref.WeakSet[Execution] = weakref.WeakSet()
        self._mpi = world.comm.Dup()
        self._sends: list[tuple[Any, bytes]] = []
        self._answers: dict[int, list[Entry]] = {}
        # world ranks that came to their end: their last collective of each group
        self._left: dict[int, dict[str, int]] = {}
        self._round = 0
        # the world rank that prints the report, as far as this rank has learnt
        self._printers: dict[Subject, int] = {}
        self._printed: set[Subject] = set()
        # By group: what was reported of it, when, and the report's first line.
        self._reported: weakref.WeakKeyDictionary[Execution, tuple[str, float, str]] = (
            weakref.WeakKeyDictionary()
        )
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if world.size > 1:
            self._thread = threading.Thread(
                target=runtime.guard_thread(self._run), name="mpidist-watchdog", daemon=True
            )
            self._thread.start()
            runtime.close_at_exit(self, stage=1)

    def close(self, timeout_s: float) -> None:
        """Stop the thread, and tell the others that this process takes part in nothing any more."""
        self._stop.set()
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        last = {
            group.key: group.journal.sequence for group in list(self.groups) if not group.is_closed
        }
        for rank in range(self.world.size):
            if rank != self.world.rank:
                self._send(rank, (LEFT, 0, last))
        if dead := self._dead():
            runtime.note_failure(dead)
        if runtime.unfinished() is not None:
            self._await_ends()

    def _await_ends(self) -> None:
        """Wait until the living have come to their ends, too: whoever goes first would end what they are still doing."""
        start = time.monotonic()
        while others := self._unended():
            self._round += 1
            self._answers = {}
            for rank in others:
                self._send(rank, (ASK, self._round, (("", "the end"), self.world.rank)))
            self._serve_until(lambda: not self._unended(), _SILENT_S)
            others = self._unended()
            waited = time.monotonic() - start
            if others and (waited > _LONGEST_END_S or not others & set(self._answers)):
                names = ", ".join(map(str, sorted(others)))
                runtime.abort(
                    f"a call of MPI has failed, and {waited:.0f} s after this rank came to its end "
                    f"rank {names} had not"
                )
        runtime.note_failure(self._dead())

    def _unended(self) -> set[int]:
        return set(range(self.world.size)) - {self.world.rank} - set(self._dead()) - set(self._left)

    def _dead(self) -> tuple[int, ...]:
        return mpi_errors.known_dead(self._mpi, range(self.world.size)) or ()

    def _run(self) -> None:
        while not self._stop.wait(_POLL_S):
            self._serve()
            for group in list(self.groups):
                if not group.is_closed:
                    self._look_at(group)

    def _look_at(self, group: Execution) -> None:
        limit = group.timeout_s
        creation, age = group.journal.creation()
        if limit is not None and age > limit:
            self._mind(
                group, "new_group", limit, (), lambda: group.journal.creation()[0] == creation
            )
            return
        missing = self._missing(group)
        if missing:
            limit = exited_ranks.GRACE_S if limit is None else min(limit, exited_ranks.GRACE_S)
        if limit is None or group.journal.observe() <= limit:
            self._reported.pop(group, None)
            return
        sequence = group.journal.sequence

        def is_late() -> bool:
            return group.journal.sequence == sequence and group.journal.observe() > limit

        self._mind(group, f"{group.journal.operation} number {sequence}", limit, missing, is_late)

    def _mind(
        self,
        group: Execution,
        what: str,
        limit_s: float,
        missing: Sequence[int],
        is_late: Callable[[], bool],
    ) -> None:
        """Report a late operation once; end the job if it does not come back."""
        told = self._reported.get(group)
        if told is None or told[0] != what:
            self._report(group, what, limit_s, missing, is_late)
        elif time.monotonic() - told[1] > _ABORT_S:
            runtime.abort(f"no return from MPI within {_ABORT_S:g} s of the report: {told[2]}")

    def _missing(self, group: Execution) -> list[int]:
        """Return the members that have left and did not take part in the group's present collective."""
        sequence = group.journal.sequence
        # A group that such a rank had closed is not in its list: whatever it had to do there was
        # done.
        return [
            rank
            for rank in group.world_ranks
            if rank in self._left and self._left[rank].get(group.key, sequence) < sequence
        ]

    def _report(
        self,
        group: Execution,
        what: str,
        limit_s: float,
        missing: Sequence[int],
        is_late: Callable[[], bool],
    ) -> None:
        subject = (group.key, what)
        self._ask(group, subject)
        problem = (
            "waits for a rank that has left" if missing else f"is past its timeout of {limit_s:g} s"
        )
        text = _describe(group, what, problem, self._answers, missing, self.world.rank)
        if not is_late():
            return  # it ended while the answers came in
        if self._printers[subject] != self.world.rank:
            self._serve_until(lambda: subject in self._printed, _PRINTED_S)
        if subject not in self._printed:
            runtime.write_stderr(text)
            self._printed.add(subject)
            self._tell_members(group, (PRINTED, 0, subject))
        self._fail(group, text, missing)
        if group.on_timeout == RAISE:
            self._tell_members(group, (FAILED, 0, (group.key, text, tuple(missing))))
        group.revoke()
        self._reported[group] = (what, time.monotonic(), text.split(". ")[0])

    def _fail(self, group: Execution, text: str, missing: Sequence[int]) -> None:
        text = text.rstrip()
        runtime.note_report(text)
        group.fail(RankFailureError(text, missing) if missing else CommTimeout(text))

    def _ask(self, group: Execution, subject: Subject) -> None:
        self._round += 1
        self._answers = {self.world.rank: group.journal.snapshot()}
        printer = self._printers.setdefault(subject, self.world.rank)
        others = self._tell_members(group, (ASK, self._round, (subject, printer)))
        self._serve_until(lambda: len(self._answers) > others, _COLLECT_S)

    def _serve_until(self, is_enough: Callable[[], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not is_enough() and time.monotonic() < deadline:
            self._serve()
            time.sleep(1e-3)

    def _tell_members(self, group: Execution, content: tuple[str, int, Any]) -> int:
        """Send to all other members that have not ended; return how many they are."""
        others = [
            rank for rank in group.world_ranks if rank != self.world.rank and rank not in self._left
        ]
        for rank in others:
            self._send(rank, content)
        return len(others)

    def _serve(self) -> None:
        status = MPI.Status()
        while (message := mpi_errors.matched_probe(self._mpi, _TAG, status)) is not None:
            data = bytearray(status.Get_count(MPI.BYTE))
            source = status.Get_source()
            message.Recv((data, len(data), MPI.BYTE))
            try:
                self._hear(source, *watchdog_messages.decoded(data))
            except FrameError as error:
                _log.warning(
                    "the watchdog drops a message of %d bytes of rank %d: %s",
                    len(data),
                    source,
                    error,
                )
        self._sends = [
            (request, data) for request, data in self._sends if not mpi_errors.is_over(request)
        ]

    def _hear(self, source: int, kind: str, number: int, content: Any) -> None:
        if kind == ASK:
            subject, printer = content
            self._printers[subject] = min(self._printers.get(subject, printer), printer)
            self._send(source, (ANSWER, number, self._doings(subject[0])))
        elif kind == PRINTED:
            self._printed.add(content)
        elif kind == FAILED:
            key, text, missing = content
            for group in list(self.groups):
                if group.key == key:
                    self._fail(group, text, missing)
        elif kind == LEFT:
            self._left[source] = content
            exited_ranks.record(source)
        elif number == self._round:
            self._answers[source] = content

    def _doings(self, key: str) -> list[Entry]:
        # Of the group asked about, and of any other in which this rank is inside a call: that is
        # where a hang usually lies.
        entries = []
        for group in list(self.groups):
            told = group.journal.snapshot()
            entries += (
                told if group.key == key else [entry for entry in told if entry.seconds is not None]
            )
        return entries

    def _send(self, rank: int, content: tuple[str, int, Any]) -> None:
        data = watchdog_messages.encoded(*content)
        with mpi_errors.death_tolerated():
            self._sends.append((self._mpi.Isend((data, len(data), MPI.BYTE), rank, _TAG), data))


def _describe(
    group: Execution,
    what: str,
    problem: str,
    answers: dict[int, list[Entry]],
    missing: Sequence[int],
    me: int,
) -> str:
    lines = [
        f'mpidist: {what} of group "{group.name}" {problem}. What each rank is in (process '
        f"{os.getpid()} of rank {me} reports):"
    ]
    for place, rank in enumerate(group.world_ranks):
        label = f"  rank {place}" + (f" (world rank {rank})" if place != rank else "")
        entries = answers.get(rank)
        if rank in missing:
            lines.append(f"{label}: has come to the end of its program, and never called this")
        elif entries is None and exited_ranks.among((rank,)):
            lines.append(f"{label}: has come to the end of its program")
        elif entries is None:
            lines.append(
                f"{label}: no answer within {_COLLECT_S:g} s; the process is stopped, dead, or "
                "holds the interpreter"
            )
        else:
            lines += [f"{label}: {entry}" for entry in entries] or [
                f"{label}: does not know this group (closed, or not made yet)"
            ]
    return "\n".join(lines) + "\n"
