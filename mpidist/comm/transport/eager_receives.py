"""Receives of eager messages: persistent requests, which ``Start`` opens again.

Open MPI writes a message that is longer than its receive past the end of the receive's memory, and
reports the truncation afterwards (``matched_probe``). No transport sends a longer one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias

from mpidist.comm.mpi import mpi_errors
from mpidist.comm.mpi.library import MPI
from mpidist.comm.transport.eager_message import EAGER_BYTES
from mpidist.comm.transport.incoming import Request

_PAUSE_S = 1e-4

# Receives that MPI did not complete; kept alive because MPI may still write to their memory.
_unfinished: list[tuple[Request, bytearray]] = []


class Restartable(Request, Protocol):
    """A persistent request."""

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
    timeout_s: float,
) -> None:
    """Complete posted receives by messages to this rank; drop messages that had arrived.

    MPI_Cancel is not called: another thread that polls may match the receive at the same time,
    after which Open MPI's queue is damaged. Each posted receive gets one empty message of this rank
    itself, behind those that have arrived. No other message has this rank as its source, because a
    transport copies what it sends to itself.

    Args:
        mpi: The communicator of the receives.
        tag: Their tag.
        receives: Persistent requests, their memory, their ``Test``, in the order of posting.
        idle: The request among them that was read and not started again, or None.
        timeout_s: Longest wait for messages that are arriving.
    """
    posted = []
    for request, space, _ in receives:
        if request is idle:
            request.Free()
        else:
            posted.append((request, space))
    if not posted:
        return
    try:
        own = mpi.Get_rank()
        sends = [mpi.Isend((b"", 0, MPI.BYTE), own, tag) for _ in posted]
    except Exception:  # the communicator is freed, or revoked (ULFM)
        _unfinished.extend(posted)
        return
    status, ended, incomplete = MPI.Status(), 0, 0
    deadline = time.monotonic() + timeout_s
    for request, space in posted:
        try:
            if not _is_complete(mpi, request, status, deadline):
                _unfinished.append((request, space))
                incomplete += 1
                continue
        except Exception:
            # Refused: the receive is over nevertheless.
            pass
        ended += status.Get_source() == own
        request.Free()
    # Another rank's message has completed a receive in place of each of these.
    with contextlib.suppress(Exception):  # as above
        for _ in range(0 if incomplete else len(posted) - ended):
            mpi.Recv((bytearray(1), 0, MPI.BYTE), own, tag)
        for send in sends:
            send.Wait()


def _is_complete(mpi: MPI.Comm, request: Any, status: MPI.Status, deadline: float) -> bool:
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
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)
