"""Timelines that a program asks for: of a ``with`` block, or of all of it by ``MPIDIST_TRACE``."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

from mpidist.comm.mpi import runtime, tracing
from mpidist.trace.session import Session

_STAGE = 2  # of the exit: groups and the watchdog have ended, nothing is recorded any more

_log = logging.getLogger(__name__)
_sessions: list[Session] = []  # of this world
_program: Program | None = None


@contextlib.contextmanager
def record(file: str | os.PathLike[str]) -> Iterator[None]:
    """Record what all ranks do within the context, and write one trace of it.

    The file is Chrome's JSON: https://ui.perfetto.dev and chrome://tracing show it. Each rank is a
    process, each thread a row; arrows go from sends to receives, from calls to handlers and back,
    and from the last rank that enters a collective to all others. Times are on rank 0's clock:
    offsets are measured at both ends of the context, and the file states their error.

    Collective: over the world's ranks, at the begin and at the end. Contexts may be nested; each
    writes its own file. Blocks: at the end until rank 0 has written the file.

    A rank that leaves the context by an exception does not wait for the others: it writes its own
    part (``run.json.gz`` becomes ``run-rank3.json.gz``). A forked child that leaves it writes
    nothing.

    Args:
        file: Path of the file, the same on all ranks; rank 0 writes it, by gzip if it ends in
            ``.gz``.

    Raises:
        OSError: The file cannot be written (all ranks).
        DisagreementError: The ranks name different files (all ranks).
        MpidistError: ``MPIDIST_RECORDER`` is 0 on a rank (all ranks).
        CommTimeout, RankFailureError: A rank did not come to the begin or the end, or has ended.
    """
    session, pid = Session(file), os.getpid()
    _sessions.append(session)
    try:
        yield
    except BaseException:
        if session in _sessions:
            _sessions.remove(session)
            session.abandon()
        raise
    if session not in _sessions:
        if os.getpid() != pid:
            return
        _log.warning("the world has ended within the trace of %s: it is cut there", file)
        return
    _sessions.remove(session)
    session.end()


class Program:
    """Trace of a whole program, which ends with MPI."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def close(self, timeout_s: float) -> None:
        """Write the trace; as MPI itself, this waits for all ranks."""
        if self.session not in _sessions:
            return
        _sessions.remove(self.session)
        try:
            rest = runtime.unfinished()
            # A job that has gone on after deaths ends well, in a world of living ranks.
            if rest is None or (rest.status is not None and not rest.dead):
                self.session.end(may_have_left=True)
            else:
                self.session.abandon()
        except Exception as error:
            _log.warning("no trace of this program: %s", error)


def begin_program() -> None:
    """Begin the trace that ``MPIDIST_TRACE`` asks for, unless this world has it.

    Collective: over the world's ranks; called with the first group of all ranks.
    """
    global _program
    if _program is None:
        session = Session(tracing.file())
        _program = Program(session)
        _sessions.append(session)
        runtime.close_at_exit(_program, _STAGE)


def _uses() -> list[str]:
    asked = [session for session in _sessions if _program is None or session != _program.session]
    return [f"the trace {session.path}" for session in asked]


def _abandon() -> None:
    while _sessions:
        _sessions.pop().abandon()


def _drop() -> None:
    global _program
    _abandon()
    _program = None


runtime.belongs_to_world(_drop, _uses, _abandon)
# A forked child neither writes the trace nor sends its part, wherever it leaves the context.
os.register_at_fork(after_in_child=_sessions.clear)
