"""Receives of eager messages: persistent requests, or matched probes (MPI-4.1 §3.8.2).

Open MPI writes a message that is longer than its receive past the end of the receive's memory, and
reports the truncation afterwards (``matched_probe``). Persistent receives are the fastest, and suit
processes that trust each other. A ``ProbedReceive`` gives MPI memory after the length of the
message is known; a longer message is received with length zero, so no memory is written.

Both have the interface of a persistent request: ``Test`` fills a status with source and length,
``Start`` opens the next receive.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias

from mpidist.comm.mpi import mpi_errors
from mpidist.comm.mpi.library import MPI
from mpidist.comm.transport.eager_message import EAGER_BYTES
from mpidist.comm.transport.incoming import Request
from mpidist.errors import FrameError

_PAUSE_S = 1e-4

# Source and bytes of a message, or its error.
Kept: TypeAlias = tuple[int, bytes | Exception]
# Receives that MPI did not complete; kept alive because MPI may still write to their memory.
_unfinished: list[tuple[Request, bytearray]] = []


class Restartable(Request, Protocol):
    """A persistent request, or a ``ProbedReceive``."""

    def Start(self) -> None:
        """See MPI_Start."""


# A receive, its memory, and its ``Test``.
EagerReceive: TypeAlias = "tuple[Restartable, bytearray, Callable[[MPI.Status], bool]]"


def post_receives(mpi: MPI.Comm, tag: int, count: int) -> list[EagerReceive]:
    """Post persistent receives; return each with its memory and its ``Test``."""
    made: list[EagerReceive] = []
    for _ in range(count):
        space = bytearray(EAGER_BYTES)
        request = mpi.Recv_init((space, EAGER_BYTES, MPI.BYTE), MPI.ANY_SOURCE, tag)
        request.Start()
        made.append((request, space, request.Test))
    return made


def withdraw(
    mpi: MPI.Comm,
    tag: int,
    receives: Iterable[tuple[Any, bytearray, object]],
    idle: Any,
    timeout_s: float | None = None,
) -> list[Kept]:
    """Complete posted receives by messages to this rank; return messages that had arrived.

    MPI_Cancel is not called: another thread that polls may match the receive at the same time,
    after which Open MPI's queue is damaged. Each posted receive gets one empty message of this rank
    itself, behind those that have arrived. No other message has this rank as its source, because a
    transport copies what it sends to itself.

    Args:
        mpi: The communicator of the receives.
        tag: Their tag.
        receives: Persistent requests, their memory, their ``Test``, in the order of posting.
        idle: The request among them that was read and not started again, or None.
        timeout_s: Longest wait for messages that are arriving; None for no limit.

    Returns:
        The messages in order, without this rank's own.
    """
    posted = []
    for request, space, _ in receives:
        if request is idle:
            request.Free()
        else:
            posted.append((request, space))
    if not posted:
        return []
    try:
        own = mpi.Get_rank()
        sends = [mpi.Isend((b"", 0, MPI.BYTE), own, tag) for _ in posted]
    except Exception:  # the communicator is freed, or revoked (ULFM)
        _unfinished.extend(posted)
        return []
    kept: list[Kept] = []
    status, ended, incomplete = MPI.Status(), 0, 0
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    for request, space in posted:
        try:
            if not _is_complete(mpi, request, status, deadline):
                _unfinished.append((request, space))
                incomplete += 1
                continue
            if status.Get_source() == own:
                ended += 1
            else:
                kept.append((status.Get_source(), bytes(space[: status.Get_count(MPI.BYTE)])))
        except Exception as error:
            if status.Get_source() == own:
                ended += 1
            else:
                kept.append((status.Get_source(), error))
        request.Free()
    # Another rank's message has completed a receive in place of each of these.
    with contextlib.suppress(Exception):  # as above
        for _ in range(0 if incomplete else len(posted) - ended):
            mpi.Recv((bytearray(1), 0, MPI.BYTE), own, tag)
        for send in sends:
            send.Wait()
    return kept


def _is_complete(mpi: MPI.Comm, request: Any, status: MPI.Status, deadline: float | None) -> bool:
    """Test a receive until it is complete; False at the deadline.

    Raises:
        Exception: The receive has failed.
    """
    while True:
        try:
            if request.Test(status):
                return True
        except Exception as error:
            if not mpi_errors.is_mpi_error(error) or not mpi_errors.is_pending(error):
                raise
            # From any source, and a rank has died (ULFM): the receive is still posted.
            mpi.Ack_failed()
        if deadline is not None and time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)


class ProbedReceive:
    """Receive of one tag from any source: a message is matched, checked, then received.

    No call blocks. A matched message that has not arrived completely is still the next one, because
    messages of a sender keep their order.

    Args:
        mpi: The communicator.
        tag: Of the messages.
        kept: Messages that precede those in MPI's queue.
    """

    def __init__(self, mpi: MPI.Comm, tag: int, kept: Iterable[Kept] = ()) -> None:
        self._improbe = mpi.Improbe
        self._tag = tag
        self._any, self._byte = MPI.ANY_SOURCE, MPI.BYTE
        self.space = bytearray(EAGER_BYTES)
        self._kept = deque(kept)
        self._request: Request | None = None
        # the message under way is longer than ``space``
        self._too_long: FrameError | None = None
        self._then: Callable[[], None] | None = None
        self._is_idle = not self._kept  # the next message is in MPI's queue

    def Test(self, status: MPI.Status) -> bool:
        """Return whether the next message is in ``space``; ``status`` gets its source and length.

        Raises:
            FrameError: The message is longer than ``space``. It is dropped, and nothing was
                written.
        """
        if self._is_idle:
            message = self._improbe(self._any, self._tag, status)
            if message is None:
                return False
            nbytes = status.Get_count(self._byte)
            if nbytes > EAGER_BYTES:
                return self._discard(message, nbytes, status)
            request = message.Irecv((self.space, nbytes, self._byte))
            if request.Test(status):
                return True
            self._request, self._is_idle = request, False
            return False
        if self._request is None:
            return self._next_kept(status)
        return self._is_received(self._request, status)

    def Start(self) -> None:
        """See MPI_Start; the next ``Test`` probes for the next message."""

    def end(self, then: Callable[[], None] | None) -> None:
        """Call ``then`` instead of the next probe for a message; None: continue probing.

        Matched and kept messages precede those that ``then`` receives.
        """
        self._then = then
        self._update_idle()

    def close(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` seconds for a receive under way."""
        deadline, status = time.monotonic() + timeout_s, MPI.Status()
        while (request := self._request) is not None:
            with contextlib.suppress(Exception):
                if self._is_received(request, status):
                    break
            if self._request is not None and time.monotonic() > deadline:
                _unfinished.append((request, self.space))
                break
            time.sleep(_PAUSE_S)

    def _discard(self, message: MPI.Message, nbytes: int, status: MPI.Status) -> bool:
        source = status.Get_source()
        self._too_long = FrameError(
            f"a message of {nbytes} bytes from rank {source}; at most {EAGER_BYTES} are received "
            "in one"
        )
        request = message.Irecv((None, 0, self._byte))
        self._request, self._is_idle = request, False
        return self._is_received(request, status)

    def _is_received(self, request: Request, status: MPI.Status) -> bool:
        refused = self._too_long
        try:
            if not request.Test(status):
                return False
        except Exception as error:
            self._request = self._too_long = None
            self._update_idle()
            if (
                refused is None
                or not mpi_errors.is_mpi_error(error)
                or mpi_errors.is_failure(error)
            ):
                raise
        self._request = self._too_long = None
        self._update_idle()
        if refused is not None:
            raise refused
        return True

    def _next_kept(self, status: MPI.Status) -> bool:
        if not self._kept:
            then, self._then = self._then, _no_operation  # one poll may test several times
            if then is not None:
                then()
            return False
        source, data = self._kept.popleft()
        self._update_idle()
        status.Set_source(source)
        if isinstance(data, Exception):
            raise data
        self.space[: len(data)] = data
        status.Set_elements(self._byte, len(data))
        return True

    def _update_idle(self) -> None:
        self._is_idle = self._request is None and not self._kept and self._then is None


def _no_operation() -> None:
    """Replace a callback that has run."""
