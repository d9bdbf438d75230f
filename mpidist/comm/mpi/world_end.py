"""End of a world: its ranks wait for each other before MPI ends.

A rank that ends its program sends to ranks that may have ended theirs before: the barrier of a
group that it closes, the last message of its watchdog. In Open MPI, and within a node in MPICH,
MPI_Finalize returns when all ranks have called it. Between nodes MPICH's returns at once (5.0.2
over libfabric's TCP provider), and MPI_Isend to a rank that has gone does not return: it tries to
connect for ever.

So, unless the MPI is Open MPI, each rank tells rank 0 that it sends no more, and ends when rank 0
has told it that nobody does: 2 (W - 1) messages without content. Then it receives what nobody waits
for, the others' last messages: of those that are left MPICH prints warnings over UCX, a line each.

Source: MPI-4.1 §11.2.2: a rank receives all messages that were sent to it before it calls
MPI_Finalize.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from mpidist.comm.mpi import backoff
from mpidist.comm.mpi.closed_communicators import late_receives
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import Mpi, Request, keep

_LONGEST_SLEEP_S = 10e-3  # the others may compute for long, on this rank's core, too
_DRAIN_S = 0.1  # longest wait for the content of last messages


def await_end(mpi: Mpi, tag: int, limit_s: float | None = None) -> bool:
    """Wait until all ranks have called this; return False if the time was over.

    Ranks of which MPI reports an error (ULFM) are not waited for. Where rank 0's time is over, it
    tells the others to wait no longer.

    Collective: over the communicator, as each rank's last use of MPI.

    Blocks: until all ranks have called it, with sleeps.

    Args:
        mpi: The communicator.
        tag: A tag that nothing else uses there.
        limit_s: Longest wait; None for no limit.
    """
    others = range(1, mpi.Get_size())
    if mpi.Get_rank() == 0:
        have_come = _received(mpi, tag, others, limit_s)
        return _sent(mpi, tag, others, limit_s) and have_come
    return _sent(mpi, tag, (0,), limit_s) and _received(mpi, tag, (0,), limit_s)


def drain(comms: Iterable[Mpi]) -> None:
    """Receive the messages that have arrived on communicators, which this rank uses no more.

    Blocks: up to 0.1 s, for the content of long messages.
    """
    receives: list[Request] = []
    spaces: list[bytearray] = []
    with contextlib.suppress(Exception):  # as below
        for mpi in comms:
            for request, space in late_receives(mpi):
                receives.append(request)
                spaces.append(space)
    if not _are_over(receives, _DRAIN_S):
        keep([*receives, *spaces])


def _received(mpi: Mpi, tag: int, sources: Iterable[int], limit_s: float | None) -> bool:
    awaited = set(sources)

    def have_come() -> bool:
        for rank in tuple(awaited):
            try:
                message = mpi.Improbe(rank, tag, MPI.Status())
                if message is None:
                    continue
                message.Recv((bytearray(), 0, MPI.BYTE))
            except Exception:  # the rank has died, or the communicator is revoked (ULFM)
                pass
            awaited.discard(rank)
        return not awaited

    return backoff.until(have_come, timeout_s=limit_s, longest_s=_LONGEST_SLEEP_S)


def _sent(mpi: Mpi, tag: int, targets: Iterable[int], limit_s: float | None) -> bool:
    sends: list[Request] = []
    for rank in targets:
        with contextlib.suppress(Exception):  # as above
            sends.append(mpi.Isend((b"", 0, MPI.BYTE), rank, tag))

    is_in_time = _are_over(sends, limit_s)
    keep(sends)
    return is_in_time


def _are_over(requests: list[Request], limit_s: float | None) -> bool:
    """Wait for requests, and remove those that are over; return whether all are."""

    def are_over() -> bool:
        while requests:
            try:
                if not requests[-1].Test():
                    return False
            except Exception:  # as above
                pass
            requests.pop()
        return True

    return backoff.until(are_over, timeout_s=limit_s, longest_s=_LONGEST_SLEEP_S)
