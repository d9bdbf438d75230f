"""Watchdog: one thread per process that reports operations past their timeout.

The watchdogs of all ranks exchange messages on a communicator of their own, and no rank waits for
these messages:

1. A collective has run for longer than its group's timeout, or for 2 s without a member whose
   process has ended: the watchdog asks all members for their operations, and collects answers for
   1 s.
2. One of the late members prints the report on stderr: the lowest rank of those that asked first.
   Each question names the printer that the asker knows; the others print only if the message that
   the report is printed does not arrive in time.
3. All late members fail the group with the report. A group with ``on_timeout="raise"`` fails on all
   other members as well, and the threads that wait in it leave their calls.
4. The watchdog revokes the group's communicator if MPI has ULFM: calls under way return with an
   error, and the job may continue.
5. If the call has not returned 2 s later, the watchdog ends the job. A revoked communicator does
   not end a large transfer whose peer stays outside MPI, and a blocking call of MPI cannot be left;
   a job that hangs for good would only use up its allocation.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from mpidist.comm import watchdog_messages, watchdog_report
from mpidist.comm.execution import Execution
from mpidist.comm.group_failure import RAISE
from mpidist.comm.mpi import exited_ranks, mpi_errors, runtime
from mpidist.comm.mpi.library import MPI
from mpidist.comm.op_status import Entry
from mpidist.comm.watchdog_messages import ANSWER, ASK, FAILED, LEFT, PRINTED, Subject
from mpidist.errors import CommTimeout, FrameError, RankFailureError

_POLL_S = 0.1  # interval of the checks, and longest time until a question is answered
_COLLECT_S = 1.0  # of the wait for answers
_PRINTED_S = 0.5  # of the further wait for the message that another rank has printed the report
_ABORT_S = 2.0  # from the report to the end of the job
_SILENT_S = 10.0  # a rank without an answer for this time is stopped or dead
_LONGEST_END_S = 300.0  # of the wait at the end of a rank that has left a call of MPI
_TAG = 1

_log = logging.getLogger(__name__)

_lock = threading.Lock()
_watchdog: Watchdog | None = None


def start(world: runtime.World) -> None:
    """Start the watchdog's thread.

    Collective: over the world, because the watchdogs get a communicator of their own.
    """
    global _watchdog
    with _lock:
        if _watchdog is None or _watchdog.world is not world:
            _watchdog = Watchdog(world)


def watch(group: Execution) -> None:
    """Watch a group from now on, by a weak reference."""
    start(runtime.world())
    assert _watchdog is not None
    _watchdog.groups.add(group)


class Watchdog:
    """The thread, its communicator and the groups that it watches."""

    def __init__(self, world: runtime.World) -> None:
        self.world = world
        self.groups: weakref.WeakSet[Execution] = weakref.WeakSet()
        self._mpi = world.comm.Dup()
        self._sends: list[tuple[Any, bytes]] = []
        self._answers: dict[int, list[Entry]] = {}
        # World ranks that have ended: the number of their last collective by each group's key.
        self._left: dict[int, dict[str, int]] = {}
        self._round = 0
        # The world rank that prints the report, as far as this rank knows.
        self._printers: dict[Subject, int] = {}
        self._printed: set[Subject] = set()
        # Key: group. Value: the reported operation, the time, and the report's first sentence.
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
        """Stop the thread, and send the other watchdogs that this process has ended."""
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
        """Wait until all living ranks have ended.

        A rank that leaves MPI after a failed call would end the processes that still work.
        """
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
                    self._check(group)

    def _check(self, group: Execution) -> None:
        limit = group.timeout_s
        creation, age = group.journal.creation()
        if limit is not None and age > limit:
            self._handle_late(
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

        self._handle_late(
            group, f"{group.journal.operation} number {sequence}", limit, missing, is_late
        )

    def _handle_late(
        self,
        group: Execution,
        operation: str,
        limit_s: float,
        missing: Sequence[int],
        is_late: Callable[[], bool],
    ) -> None:
        """Report a late operation once; end the job if the operation does not return."""
        reported = self._reported.get(group)
        if reported is None or reported[0] != operation:
            self._report(group, operation, limit_s, missing, is_late)
        elif time.monotonic() - reported[1] > _ABORT_S:
            runtime.abort(f"no return from MPI within {_ABORT_S:g} s of the report: {reported[2]}")

    def _missing(self, group: Execution) -> list[int]:
        """Return the members that ended without the collective that the group executes."""
        sequence = group.journal.sequence
        # A rank's list has no groups that it had closed: it has executed all their collectives.
        return [
            rank
            for rank in group.world_ranks
            if rank in self._left and self._left[rank].get(group.key, sequence) < sequence
        ]

    def _report(
        self,
        group: Execution,
        operation: str,
        limit_s: float,
        missing: Sequence[int],
        is_late: Callable[[], bool],
    ) -> None:
        subject = (group.key, operation)
        self._collect_answers(group, subject)
        problem = (
            "waits for a rank that has left" if missing else f"is past its timeout of {limit_s:g} s"
        )
        text = watchdog_report.report(
            group, operation, problem, self._answers, missing, self.world.rank, _COLLECT_S
        )
        # The operation may have ended while the answers arrived.
        if not is_late():
            return
        if self._printers[subject] != self.world.rank:
            self._serve_until(lambda: subject in self._printed, _PRINTED_S)
        if subject not in self._printed:
            runtime.write_stderr(text)
            self._printed.add(subject)
            self._send_to_members(group, (PRINTED, 0, subject))
        self._fail(group, text, missing)
        if group.on_timeout == RAISE:
            self._send_to_members(group, (FAILED, 0, (group.key, text, tuple(missing))))
        group.revoke()
        self._reported[group] = (operation, time.monotonic(), text.split(". ")[0])

    def _fail(self, group: Execution, text: str, missing: Sequence[int]) -> None:
        text = text.rstrip()
        runtime.note_report(text)
        group.fail(RankFailureError(text, missing) if missing else CommTimeout(text))

    def _collect_answers(self, group: Execution, subject: Subject) -> None:
        self._round += 1
        self._answers = {self.world.rank: group.journal.snapshot()}
        printer = self._printers.setdefault(subject, self.world.rank)
        others = self._send_to_members(group, (ASK, self._round, (subject, printer)))
        self._serve_until(lambda: len(self._answers) > others, _COLLECT_S)

    def _serve_until(self, is_enough: Callable[[], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not is_enough() and time.monotonic() < deadline:
            self._serve()
            time.sleep(1e-3)

    def _send_to_members(self, group: Execution, content: tuple[str, int, Any]) -> int:
        """Send to all other members that have not ended; return their number."""
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
                self._handle_message(source, *watchdog_messages.decoded(data))
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

    def _handle_message(self, source: int, kind: str, number: int, content: Any) -> None:
        if kind == ASK:
            subject, printer = content
            self._printers[subject] = min(self._printers.get(subject, printer), printer)
            self._send(source, (ANSWER, number, self._entries(subject[0])))
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

    def _entries(self, key: str) -> list[Entry]:
        """Return this rank's entries of a group, and its calls under way on other groups.

        The cause of a hang is usually a call on another group.
        """
        entries = []
        for group in list(self.groups):
            of_group = group.journal.snapshot()
            if group.key != key:
                of_group = [entry for entry in of_group if entry.seconds is not None]
            entries += of_group
        return entries

    def _send(self, rank: int, content: tuple[str, int, Any]) -> None:
        data = watchdog_messages.encoded(*content)
        with mpi_errors.death_tolerated():
            self._sends.append((self._mpi.Isend((data, len(data), MPI.BYTE), rank, _TAG), data))
