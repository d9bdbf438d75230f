"""Non-blocking calls in the place of MPI's blocking ones: between nodes, and in groups whose waits may be left.

A synchronous call on one rank meets an asynchronous one on another, and MPI does not match a
blocking collective with a non-blocking one (MPI-4.1 §6.12). So between nodes all are non-blocking.
The caller's thread waits in MPI. The group's thread works beside the backward pass, from which
MPI's polling would take half of a core: it tests with growing pauses. There a transfer takes
milliseconds, and the pauses are shorter than what the network's buffers hold.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from mpidist.comm.mpi.serialized import TWINS

_SPIN_S = 50e-6
_YIELD_S = 500e-6
_SLEEP_S = 50e-6
# what calls that were left have in MPI's hands: it may write there as long as the process lives
_left: list[Any] = []

Wait = Callable[[Any, Any], None]


class TwinComm:
    """A communicator whose blocking calls are their non-blocking twins; all others are the communicator's own.

    Args:
        comm: What the twins are called on.
        wait: Called with a request and a status (or None); returns when the request has ended.
    """

    def __init__(self, comm: Any, wait: Wait) -> None:
        self._comm = comm
        self._wait = wait

    def __getattr__(self, name: str) -> Any:
        found = self._twin(name) if name in TWINS else getattr(self._comm, name)
        self.__dict__[name] = found
        return found

    def Sendrecv(
        self,
        send: Any,
        dest: int,
        sendtag: int,
        recv: Any,
        source: int,
        recvtag: int,
        status: Any = None,
    ) -> None:
        """See MPI_Sendrecv."""
        incoming = self._comm.Irecv(recv, source, recvtag)
        outgoing = self._comm.Isend(send, dest, sendtag)
        self._wait(incoming, status)
        self._wait(outgoing, None)

    def Mprobe(self, source: int, tag: int, status: Any) -> TwinMessage:
        """See MPI_Mprobe."""
        probe = _Probe(self._comm, source, tag)
        self._wait(probe, status)
        return TwinMessage(probe.message, self._wait)

    def over(self, comm: Any) -> TwinComm:
        """Return another communicator whose calls wait as this one's."""
        return TwinComm(comm, self._wait)

    def wait_all(self, requests: Iterable[Any]) -> None:
        """Wait for requests as for a twin."""
        for request in requests:
            self._wait(request, None)

    def _twin(self, name: str) -> Callable[..., None]:
        start, wait = getattr(self._comm, TWINS[name]), self._wait
        takes_status = name == "Recv"

        def call(*args: Any, **kwargs: Any) -> None:
            status = kwargs.pop("status", None)
            if takes_status and len(args) == 4:
                *args, status = args  # type: ignore[assignment]
            wait(start(*args, **kwargs), status)

        return call


class TwinMessage:
    """A matched message whose blocking receive is its non-blocking twin."""

    __slots__ = ("_message", "_wait")

    def __init__(self, message: Any, wait: Wait) -> None:
        self._message = message
        self._wait = wait

    def Recv(self, space: Any) -> None:
        """See MPI_Mrecv."""
        self._wait(self._message.Irecv(space), None)

    def Irecv(self, space: Any) -> Any:
        """See MPI_Imrecv."""
        return self._message.Irecv(space)


class _Probe:
    """A matched probe as a request that ends when a message is there.

    Attributes:
        message: The matched message, once there is one.
    """

    __slots__ = ("_comm", "_source", "_tag", "message")

    def __init__(self, comm: Any, source: int, tag: int) -> None:
        self._comm = comm
        self._source = source
        self._tag = tag
        self.message: Any = None

    def Test(self, status: Any) -> bool:
        self.message = self._comm.Improbe(self._source, self._tag, status)
        return self.message is not None

    def Wait(self, status: Any) -> None:
        self.message = self._comm.Mprobe(self._source, self._tag, status)


def promptly(request: Any, status: Any = None) -> None:
    """Wait in MPI, without pause."""
    request.Wait(status)


def patiently(request: Any, status: Any = None) -> None:
    """Test a request until it has ended, with growing pauses."""
    start = time.perf_counter()
    while not request.Test(status):
        waited = time.perf_counter() - start
        if waited > _YIELD_S:
            time.sleep(_SLEEP_S)
        elif waited > _SPIN_S:
            os.sched_yield()


class LeavableComm(TwinComm):
    """A communicator whose waits are left when its group has failed: what MPI was given stays there.

    Args:
        comm: What the twins are called on.
        check: Raises to leave.
        is_patient: Sleep between tests, for a thread beside the computation.
    """

    def __init__(self, comm: Any, check: Callable[[], None], is_patient: bool) -> None:
        super().__init__(comm, self._leavably)
        self._check = check
        self._is_patient = is_patient

    def Improbe(self, *args: Any) -> Any:
        """See MPI_Improbe; a loop of them is left, too."""
        self._check()
        message = self._comm.Improbe(*args)
        return None if message is None else TwinMessage(message, self._leavably)

    def over(self, comm: Any) -> TwinComm:
        """See TwinComm.over."""
        return LeavableComm(comm, self._check, self._is_patient)

    def _leavably(self, request: Any, status: Any = None) -> None:
        start = time.perf_counter()
        while not request.Test(status):
            waited = time.perf_counter() - start
            if waited > _SPIN_S:
                self._check()
                if self._is_patient and waited > _YIELD_S:
                    time.sleep(_SLEEP_S)
                else:
                    os.sched_yield()


def keep(error: BaseException) -> None:
    """Keep alive what the frames that an error came through hold: a request, and the memory that MPI works on for it."""
    _left.append([dict(frame.f_locals) for frame, _ in traceback.walk_tb(error.__traceback__)])
