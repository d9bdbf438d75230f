"""Watchdog: one thread per process that reports operations past their timeout.

The watchdogs of all ranks exchange messages (``watchdog_peers``):

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

Points 3 to 5 come after the seconds of ``MPIDIST_LINGER``, 0 by default, in which the processes can
be looked at. They are left out if the call returns meanwhile.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpidist.comm.execution.group_settings import RAISE
from mpidist.comm.execution.group_state import GroupState, open_groups
from mpidist.comm.execution.op_status import Call, History
from mpidist.comm.mpi import exited_ranks, rank_ranges, revocation, runtime
from mpidist.comm.recorder import recorder
from mpidist.comm.watchdog import (
    call_difference,
    flight_record,
    linger,
    thread_places,
    watchdog_report,
)
from mpidist.comm.watchdog.dump_signal import DumpSignal
from mpidist.comm.watchdog.stack_file import StackFile, path_beside
from mpidist.comm.watchdog.straggler_watch import StragglerWatch
from mpidist.comm.watchdog.watchdog_messages import FAILED, LEFT, PRINTED, Subject
from mpidist.comm.watchdog.watchdog_peers import END, Peers, fail
from mpidist.errors import MpidistError, RankFailureError

_POLL_S = 0.1  # interval of the checks, and longest time until a question is answered
_COLLECT_S = 1.0  # of the wait for answers
_PRINTED_S = 0.5  # of the further wait for the message that another rank has printed the report
_ABORT_S = 2.0  # from the report to the end of the job
_LEAVE_S = 5.0  # longest wait for the thread when the process leaves its world
_TELL_S = 5.0  # until the thread looks, which may report something else

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_watchdog: Watchdog | None = None


def start(world: runtime.World) -> None:
    """Start the watchdog's thread, if it does not run."""
    global _watchdog
    with _lock:
        if _watchdog is None:
            _watchdog = Watchdog(world)


@functools.cache
def _dump_signal() -> DumpSignal:
    """Return the process's one handler of the signal, which successive watchdogs share."""
    return DumpSignal()


def _drop() -> None:
    global _watchdog
    with _lock:
        if _watchdog is not None:
            _watchdog.leave(_LEAVE_S)
            _watchdog.peers.end_sends()
            if _watchdog.peers.dead():
                runtime.note_failure()
            _watchdog = None


runtime.belongs_to_world(_drop)


def interrupt(error: MpidistError) -> None:
    """End all waits of this process for ranks of its world, some of which have died (ULFM).

    Fails and revokes all groups, and revokes the world's communicator, by which the watchdogs of
    the other ranks do the same. Not collective.
    """
    for group in open_groups():
        group.fail(error)
        group.revoke()
    # The waits that look for the ends of ranks: for the store, for a new group, for a call.
    exited_ranks.record_end_of_world()
    revocation.revoke(runtime.world().comm)


def interrupt_at_death(is_on: bool) -> None:
    """Let the first death in this process's world end all waits in it, or no more.

    See ``interrupt``.
    """
    start(runtime.world())
    assert _watchdog is not None
    _watchdog.interrupts_at_death = is_on


def watch(group: GroupState) -> None:
    """Watch a group from now on, by a weak reference."""
    start(runtime.world())
    assert _watchdog is not None
    _watchdog.peers.groups.add(group)


@dataclass
class Reported:
    """An operation that this process has reported.

    Attributes:
        subject: The operation, as all ranks name it.
        text: The report.
        missing: World ranks that ended without this operation.
        at: Time of the report.
        interrupts: Interrupts of the process before the report.
        failed_at: Time at which the group has failed; None during the linger.
    """

    subject: Subject
    text: str
    missing: Sequence[int]
    at: float
    interrupts: int
    failed_at: float | None = None


class Watchdog:
    """The thread, the groups that it watches, and the watchdogs of the other ranks.

    Attributes:
        interrupts_at_death: A death, or another rank's ``interrupt``, ends all waits.
    """

    def __init__(self, world: runtime.World) -> None:
        self._linger_s = linger.limit_s(os.environ)
        self.world = world
        self.peers = Peers(world)
        self._stragglers = StragglerWatch(world, self.peers)
        self.interrupts_at_death = False
        self._reported: weakref.WeakKeyDictionary[GroupState, Reported] = (
            weakref.WeakKeyDictionary()
        )
        # Late operations for which this process has written its flight record, and the file.
        self._recorded: dict[Subject, Path | None] = {}
        # A thread that asks for ``ranks_at_timeout``, and that this was printed.
        self._is_asked, self._is_told = threading.Event(), threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._signal: DumpSignal | None = None
        self._stacks: StackFile | None = None
        if world.size > 1:
            self._signal = _dump_signal()
            # Behind the handler of the signal, which it calls.
            if (path := recorder.of_process().path) is not None:
                self._stacks = StackFile(path_beside(path))
            self._thread = threading.Thread(
                target=runtime.guard_thread(self._run), name="mpidist-watchdog", daemon=True
            )
            self._thread.start()
            runtime.close_at_exit(self, stage=1)
            runtime.before_timeout_ends_job(self._tell_and_linger)

    def close(self, timeout_s: float) -> None:
        """End the watch with the process, which waits for the others if a call of MPI failed."""
        if self._thread is None or self._stop.is_set():
            return
        self.leave(timeout_s)
        self.peers.serve()
        # After a recovery a rank may have ended well without MPI_Finalize.
        if dead := set(self.peers.dead()) - set(self.peers.left):
            runtime.note_failure(dead)
        unfinished = runtime.unfinished()
        if unfinished is not None and unfinished.status is None:
            self.peers.await_ends()

    def leave(self, timeout_s: float) -> None:
        """Stop the thread, and send the other watchdogs that this process has left the world."""
        self._stop.set()
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        last = {
            group.key: group.journal.history()
            for group in self.peers.groups.alive()
            if not group.is_closed
        }
        self.peers.send(self.peers.others(), LEFT, last)

    def _run(self) -> None:
        while not self._stop.wait(_POLL_S):
            self.peers.serve()
            dead = self.peers.dead()
            for rank in dead:
                exited_ranks.record_death(rank)
            if self.interrupts_at_death and (dead or revocation.is_revoked(self.world.comm)):
                self.interrupts_at_death = False
                self._interrupt(dead)
            for subject in self.peers.printers.keys() - self._recorded.keys():
                self._record_late(subject)
            if self._is_asked.is_set() and not self._is_told.is_set():
                self._tell()
            if self._signal is not None and self._signal.has_arrived():
                self._write_record("SIGUSR2")
            if self._stacks is not None:
                self._stacks.serve()
            for group in self.peers.groups.alive():
                if not group.is_closed:
                    self._check(group)
            self._stragglers.look()

    def _interrupt(self, dead: Sequence[int]) -> None:
        text = rank_ranges.named(dead) if dead else "another rank"
        interrupt(RankFailureError(f"rank {self.world.rank}: {text} of its job died", dead))

    def _tell_and_linger(self) -> None:
        """Print what the other ranks are in, then linger; called by a thread with a timeout."""
        interrupts, at = self._interrupts(), time.monotonic()
        self.peers.is_ending = True
        self._is_asked.set()
        if not self._is_told.wait(_COLLECT_S + _TELL_S):
            return
        while time.monotonic() - at < self._linger_s and self._interrupts() == interrupts:
            time.sleep(_POLL_S)

    def _tell(self) -> None:
        peers, world = self.peers, self.world
        subject = ("", "a timeout")
        others = [rank for rank in peers.others() if rank not in peers.left]
        printer = peers.printers.setdefault(subject, world.rank)
        peers.ask(others, subject, printer)
        peers.serve_until(lambda: len(peers.answers) >= len(others), _COLLECT_S)
        self._record_late(subject)
        # The lowest rank of those whose timeouts come together prints, and the first of others.
        if peers.printers[subject] == world.rank and subject not in peers.printed:
            if thread_places.of_handlers():
                peers.answers[world.rank] = peers.own_answer(subject[0])
            text, named = watchdog_report.ranks_at_timeout(
                world.rank, peers.answers, world.processes, _COLLECT_S
            )
            alive = {rank: world.processes[rank] for rank in {world.rank, *named}}
            runtime.write_stderr(
                text
                + watchdog_report.how_to_read(world.start, recorder.of_process().path)
                + linger.commands(self._linger_s, alive)
            )
            peers.printed[subject] = time.monotonic()
            peers.send(others, PRINTED, subject)
        self._is_told.set()

    def _check(self, group: GroupState) -> None:
        limit = group.timeout_s
        creation, age = group.journal.creation()
        if limit is not None and age > limit:
            self._handle_late(
                group,
                (group.key, "new_group"),
                "new_group",
                limit,
                age,
                (),
                lambda: group.journal.creation()[0] == creation,
            )
            return
        missing = self._missing(group)
        if missing:
            limit = exited_ranks.GRACE_S if limit is None else min(limit, exited_ranks.GRACE_S)
        seconds = group.journal.observe()
        if limit is None or seconds <= limit:
            self._reported.pop(group, None)
            return
        sequence = group.journal.sequence

        def is_late() -> bool:
            return group.journal.sequence == sequence and group.journal.observe() > limit

        # The subject has not the operation's name: ranks may be late in different collectives.
        subject, title = (group.key, f"number {sequence}"), group.journal.snapshot()[0].title
        self._handle_late(group, subject, title, limit, seconds, missing, is_late)

    def _handle_late(
        self,
        group: GroupState,
        subject: Subject,
        title: str,
        limit_s: float,
        seconds: float,
        missing: Sequence[int],
        is_late: Callable[[], bool],
    ) -> None:
        """Report a late operation once; end the job if the operation does not return."""
        reported = self._reported.get(group)
        if reported is None or reported.subject != subject:
            reported = self._report(group, subject, title, limit_s, seconds, missing, is_late)
        if reported is None:
            return
        now = time.monotonic()
        if reported.failed_at is None:
            if now - reported.at >= self._linger_s or self._interrupts() != reported.interrupts:
                self._fail(group, reported)
        elif now - reported.failed_at > _ABORT_S:
            runtime.abort(
                f"no return from MPI within {self._linger_s + _ABORT_S:g} s of the report: "
                f"{reported.text.removeprefix('mpidist: ').split('. ')[0]}"
            )

    def _interrupts(self) -> int:
        return 0 if self._signal is None else self._signal.interrupts

    def _fail(self, group: GroupState, reported: Reported) -> None:
        text, missing = reported.text, reported.missing
        # Sent before this rank's threads leave their calls, and may do something that others see.
        if group.on_timeout == RAISE:
            self.peers.send(self.peers.members(group), FAILED, (group.key, text, tuple(missing)))
        fail(group, text, missing)
        group.revoke()
        reported.failed_at = time.monotonic()

    def _missing(self, group: GroupState) -> list[int]:
        """Return the members that ended without the collective that the group executes, or died."""
        sequence, left = group.journal.sequence, self.peers.left
        own = group.journal.history().call(sequence) if left else None
        # A rank's list has no groups that it had closed: it has executed all their collectives.
        # Those that died while this rank waits for them: MPI returns from most calls by itself
        # (ULFM), within the grace time.
        return [
            rank
            for rank in group.world_ranks
            if (rank in left and _lacks(left[rank].get(group.key), sequence, own))
            or (exited_ranks.have_died((rank,)) and exited_ranks.all_ended((rank,)))
        ]

    def _report(
        self,
        group: GroupState,
        subject: Subject,
        title: str,
        limit_s: float,
        seconds: float,
        missing: Sequence[int],
        is_late: Callable[[], bool],
    ) -> Reported | None:
        peers, interrupts, begin = self.peers, self._interrupts(), time.monotonic() - seconds
        self._collect_answers(group, subject)
        file = self._record_late(subject)
        problem = (
            "waits for a rank that has left" if missing else f"is past its timeout of {limit_s:g} s"
        )
        text, named = watchdog_report.report(
            group,
            title,
            problem,
            peers.answers,
            missing,
            peers.left,
            self.world.processes,
            _COLLECT_S,
        )
        # The operation may have ended while the answers arrived.
        if not is_late():
            return None
        # A report on another call of the group has this rank in it, too.
        if peers.printer_of(group, begin) != self.world.rank:
            peers.serve_until(lambda: peers.has_printed(group, begin), _PRINTED_S)
        if not peers.has_printed(group, begin):
            runtime.write_stderr(
                text
                + flight_record.how_to_read(file, self.world.rank)
                + watchdog_report.how_to_read(self.world.start, recorder.of_process().path)
                + self._commands(group, named)
            )
            peers.printed[subject] = time.monotonic()
            peers.send(peers.members(group), PRINTED, subject)
        reported = Reported(subject, text, missing, time.monotonic(), interrupts)
        self._reported[group] = reported
        return reported

    def _commands(self, group: GroupState, named: Sequence[int]) -> str:
        """Return the lines with a command for each of these members whose process may live."""
        processes = {
            rank: self.world.processes[world_rank]
            for rank in named
            if not exited_ranks.among((world_rank := group.world_ranks[rank],))
        }
        return linger.commands(self._linger_s, processes)

    def _record_late(self, subject: Subject) -> Path | None:
        """Write flight record and stacks once for a late operation; return the record's file."""
        if subject not in self._recorded:
            if self._stacks is not None and subject != END:
                self._stacks.write()
            # The question at the end of a program names no group.
            is_wanted = subject[0] and flight_record.is_written_on_timeout(os.environ)
            self._recorded[subject] = self._write_record(subject[1]) if is_wanted else None
        return self._recorded[subject]

    def _write_record(self, reason: str) -> Path | None:
        try:
            return flight_record.write(open_groups(), self.world.rank, self.world.first)
        except OSError as error:
            _log.warning("no flight record of rank %d (%s): %s", self.world.rank, reason, error)
        return None

    def _collect_answers(self, group: GroupState, subject: Subject) -> None:
        peers, others = self.peers, self.peers.members(group)
        printer = peers.printers.setdefault(subject, self.world.rank)
        peers.ask(others, subject, printer)
        peers.answers[self.world.rank] = peers.own_answer(group.key)
        peers.serve_until(lambda: len(peers.answers) > len(others), _COLLECT_S)


def _lacks(history: History | None, sequence: int, call: Call | None) -> bool:
    """Return whether a rank that has ended will never take part in the collective of a number."""
    if history is None:  # a group that it had closed
        return False
    return history.sequence < sequence or call_difference.are_different(history, sequence, call)
