"""Watchdogs of the other ranks: messages to and from them, and what these messages have reported.

Messages travel on a communicator of their own, between the watchdogs' threads alone. No send and no
receive waits for its peer: a rank that is stopped or dead must not stop the watchdog of another.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from mpidist.comm.execution.group_state import GroupState
from mpidist.comm.execution.op_status import History
from mpidist.comm.mpi import agreement_lock, exited_ranks, mpi_errors, nonblocking, runtime
from mpidist.comm.mpi.library import MPI
from mpidist.comm.watchdog import last_operations, thread_places, watchdog_messages
from mpidist.comm.watchdog.arrivals import AllArrivals
from mpidist.comm.watchdog.watchdog_messages import (
    ANSWER,
    ARRIVALS,
    ASK,
    FAILED,
    LEFT,
    PRINTED,
    Answer,
    Subject,
)
from mpidist.errors import CommTimeout, FrameError, RankFailureError
from mpidist.weak_registry import WeakRegistry

_SILENT_S = 10.0  # a rank without an answer for this time is stopped or dead
_LONGEST_END_S = 300.0  # of the wait at the end of a rank that has left a call of MPI
_LEAVING_S = 1.0  # longest wait for the last messages, of a few bytes, when a world is left
_TAG = 1
END: Subject = ("", "the end")  # of a program, where nothing is late

_log = logging.getLogger(__name__)


class Peers:
    """The other ranks' watchdogs.

    Attributes:
        groups: Groups of this process, by weak references.
        left: World ranks that have ended: their last collectives by each group's key.
        answers: Answers to the last question by world rank.
        printers: The world rank that prints the report on a subject, as far as this rank knows.
        asked: Times of the last questions on subjects, this process's among them.
        printed: Times at which reports on subjects were printed, here or as another rank has told.
        arrivals: Arrivals at collectives that the ranks have told this one.
        is_ending: Whether a thread of this process has a timeout that ends the job.
    """

    def __init__(self, world: runtime.World) -> None:
        self.world = world
        self.groups: WeakRegistry[GroupState] = WeakRegistry()
        self.left: dict[int, dict[str, History]] = {}
        self.answers: dict[int, Answer] = {}
        self.printers: dict[Subject, int] = {}
        self.asked: dict[Subject, float] = {}
        self.printed: dict[Subject, float] = {}
        self.arrivals = AllArrivals()
        self.is_ending = False
        self._mpi = world.watchdogs
        self._sends: list[tuple[MPI.Request, bytes]] = []
        self._round = 0

    def ask(self, ranks: Sequence[int], subject: Subject, printer: int) -> None:
        """Ask ranks for their operations; ``answers`` then has the answers to this question."""
        self._round += 1
        self.answers = {}
        self.asked[subject] = time.monotonic()
        self.send(ranks, ASK, (subject, printer), self._round)

    def send(self, ranks: Sequence[int], kind: str, content: object, number: int = 0) -> None:
        """Send a message to world ranks; a dead one is skipped."""
        data = watchdog_messages.encoded(kind, number, content)
        for rank in ranks:
            with mpi_errors.death_tolerated(), agreement_lock.lock:
                request = self._mpi.Isend((data, len(data), MPI.BYTE), rank, _TAG)
                self._sends.append((request, data))

    def members(self, group: GroupState) -> list[int]:
        """Return the world ranks of a group's other members that have not ended."""
        return [
            rank for rank in group.world_ranks if rank != self.world.rank and rank not in self.left
        ]

    def others(self) -> list[int]:
        """Return all other world ranks."""
        return [rank for rank in range(self.world.size) if rank != self.world.rank]

    def dead(self) -> tuple[int, ...]:
        """Return the world ranks that MPI knows to be dead."""
        return mpi_errors.known_dead(self._mpi, range(self.world.size)) or ()

    def serve(self) -> None:
        """Receive and handle the messages that have arrived."""
        status = MPI.Status()
        while (message := mpi_errors.matched_probe(self._mpi, _TAG, status)) is not None:
            data = bytearray(status.Get_count(MPI.BYTE))
            source = status.Get_source()
            with agreement_lock.lock:
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

    def serve_until(self, is_enough: Callable[[], bool], limit_s: float) -> None:
        """Serve until the condition holds or the time is over."""
        deadline = time.monotonic() + limit_s
        while not is_enough() and time.monotonic() < deadline:
            self.serve()
            time.sleep(1e-3)

    def printer_of(self, group: GroupState, begin: float) -> int:
        """Return the world rank that prints the report on a group, as far as this rank knows.

        Where ranks wait in different collectives, each of them is asked for by its number.

        Args:
            begin: Time at which this rank's late operation has begun: earlier ones are over.
        """
        return min(
            (
                self.printers[subject]
                for subject, at in self.asked.items()
                if subject[0] == group.key and at >= begin
            ),
            default=self.world.rank,
        )

    def has_printed(self, group: GroupState, begin: float) -> bool:
        """Return whether a report on a group was printed since this time, which has all ranks."""
        return any(key == group.key and at >= begin for (key, _), at in self.printed.items())

    def end_sends(self) -> None:
        """Wait until the messages have left this process; keep those that do not leave in time."""
        self.serve_until(lambda: not self._sends, _LEAVING_S)
        if self._sends:
            nonblocking.keep(self._sends)

    def await_ends(self) -> None:
        """Wait until all living ranks have ended.

        A rank that leaves MPI after a failed call would end the processes that still work.
        """
        start = time.monotonic()
        while others := self._unended():
            self.ask(sorted(others), END, self.world.rank)
            self.serve_until(lambda: not self._unended(), _SILENT_S)
            others = self._unended()
            waited = time.monotonic() - start
            if others and (waited > _LONGEST_END_S or not others & set(self.answers)):
                names = ", ".join(map(str, sorted(others)))
                runtime.abort(
                    f"a call of MPI has failed, and {waited:.0f} s after this rank came to its end "
                    f"rank {names} had not"
                )
        runtime.note_failure(self.dead())

    def _unended(self) -> set[int]:
        return set(self.others()) - set(self.dead()) - set(self.left)

    def _handle_message(self, source: int, kind: str, number: int, content: Any) -> None:
        if kind == ASK:
            subject, printer = content
            self.printers[subject] = min(self.printers.get(subject, printer), printer)
            self.asked[subject] = time.monotonic()
            self.send((source,), ANSWER, self.own_answer(subject[0]), number)
        elif kind == PRINTED:
            self.printed[content] = time.monotonic()
        elif kind == FAILED:
            key, text, missing = content
            for group in self.groups.alive():
                if group.key == key:
                    fail(group, text, missing)
        elif kind == LEFT:
            self.left[source] = content
            exited_ranks.record(source)
        elif kind == ARRIVALS:
            self.arrivals.add(source, content)
        elif number == self._round:
            self.answers[source] = content

    def own_answer(self, key: str) -> Answer:
        """Return this rank's operations on a group, and its calls under way on other groups.

        The cause of a hang is usually a call on another group.
        """
        entries, history = [], History()
        for group in self.groups.alive():
            of_group = group.journal.snapshot()
            if group.key != key:
                of_group = [entry for entry in of_group if entry.seconds is not None]
            else:
                history = group.journal.history()
            entries += of_group
        if self.is_ending:
            # The thread with the timeout has left the user's program; what it called may wait for a
            # handler here.
            places = ["ended by a timeout of its own", *thread_places.of_handlers()]
        else:
            places = thread_places.places()
        return Answer(entries, tuple(places), history, last_operations.own())


def fail(group: GroupState, text: str, missing: Sequence[int]) -> None:
    """Fail a group with a report."""
    text = text.rstrip()
    runtime.note_report(text)
    group.fail(RankFailureError(text, missing) if missing else CommTimeout(text))
