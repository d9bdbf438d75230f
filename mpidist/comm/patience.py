"""MPI's blocking calls for a thread that works beside another: it gives its core away while it waits.

A blocking call polls without pause, and takes half of a core from the backward pass that it should run beside. So it becomes its
non-blocking twin and a loop of tests with growing pauses. Only the group's own thread waits like this, and only between nodes:
there a transfer takes milliseconds, and the pauses are shorter than what the network's buffers hold.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from mpidist.comm.door import TWINS

_SPIN_S = 50e-6
_YIELD_S = 500e-6
_SLEEP_S = 50e-6


class PatientComm:
    """A communicator whose blocking calls wait with pauses; all others are the communicator's own."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        found = self._patient(name) if name in TWINS else getattr(self._comm, name)
        self.__dict__[name] = found
        return found

    def Sendrecv(self, send: Any, dest: int, sendtag: int, recv: Any, source: int, recvtag: int, status: Any = None) -> None:
        """See MPI_Sendrecv."""
        incoming = self._comm.Irecv(recv, source, recvtag)
        outgoing = self._comm.Isend(send, dest, sendtag)
        wait(incoming, status)
        wait(outgoing)

    def _patient(self, name: str) -> Callable[..., None]:
        start = getattr(self._comm, TWINS[name])
        takes_status = name == "Recv"

        def call(*args: Any, **kwargs: Any) -> None:
            status = kwargs.pop("status", None)
            if takes_status and len(args) == 4:
                *args, status = args  # type: ignore[assignment]
            wait(start(*args, **kwargs), status)

        return call


def wait(request: Any, status: Any = None) -> None:
    """Test a request until it has ended, with growing pauses."""
    start = time.perf_counter()
    while not request.Test(status):
        waited = time.perf_counter() - start
        if waited > _YIELD_S:
            time.sleep(_SLEEP_S)
        elif waited > _SPIN_S:
            os.sched_yield()
