"""One door to MPI for libraries that admit one thread at a time (``MPI_THREAD_SERIALIZED``).

Holding a lock around a blocking collective would let two threads on two ranks wait for each other.
So a blocking call becomes its non-blocking twin and a loop of tests, and the door is open between
two tests. At ``MPI_THREAD_MULTIPLE`` none of this is used.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from mpidist.comm.mpi.library import MPI

_door = threading.RLock()

# Calls whose non-blocking twin has the same arguments.
TWINS = {
    name: "I" + name.lower()
    for name in (
        "Allreduce", "Reduce", "Bcast", "Barrier", "Allgather", "Allgatherv", "Gather", "Gatherv", "Scatter", "Scatterv",
        "Alltoall", "Alltoallv", "Reduce_scatter_block", "Reduce_scatter", "Send", "Ssend", "Recv",
    )
}  # fmt: skip
_HANDLES = frozenset({"Dup", "Split", "Split_type", "Create_group"})


class SerialRequest:
    """A request whose every call goes through the door."""

    __slots__ = ("_request",)

    def __init__(self, request: Any) -> None:
        self._request = request

    def Test(self, status: Any = None) -> bool:
        """See MPI_Test."""
        with _door:
            return bool(self._request.Test(status))

    def Wait(self, status: Any = None) -> bool:
        """See MPI_Wait; the door is open between two tests."""
        while not self.Test(status):
            os.sched_yield()
        return True

    def Start(self) -> None:
        """See MPI_Start."""
        with _door:
            self._request.Start()

    def Cancel(self) -> None:
        """See MPI_Cancel."""
        with _door:
            self._request.Cancel()

    def Free(self) -> None:
        """See MPI_Request_free."""
        with _door:
            self._request.Free()


class SerialMessage:
    """A matched message whose receive goes through the door; what was matched arrives without anybody's help."""

    __slots__ = ("_message",)

    def __init__(self, message: Any) -> None:
        self._message = message

    def Irecv(self, space: Any) -> SerialRequest:
        """See MPI_Imrecv."""
        with _door:
            return SerialRequest(self._message.Irecv(space))

    def Recv(self, space: Any) -> None:
        """See MPI_Mrecv."""
        self.Irecv(space).Wait()


class SerialComm:
    """A communicator whose every call goes through the door; what it creates does so too."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in TWINS:
            call = self._blocking(TWINS[name], takes_status=name == "Recv")
        else:
            call = self._direct(name)
        # A communicator's calls are few; keeping the wrapper saves building it again.
        self.__dict__[name] = call
        return call

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
        incoming = self.Irecv(recv, source, recvtag)
        outgoing = self.Isend(send, dest, sendtag)
        incoming.Wait(status)
        outgoing.Wait()

    def Mprobe(self, source: int, tag: int, status: Any) -> SerialMessage:
        """See MPI_Mprobe; the door is open between two probes."""
        while (message := self.Improbe(source, tag, status)) is None:
            os.sched_yield()
        return message

    def _blocking(self, twin: str, takes_status: bool) -> Callable[..., Any]:
        start = self._direct(twin)

        def call(*args: Any, **kwargs: Any) -> None:
            status = kwargs.pop("status", None)
            if takes_status and len(args) == 4:
                *args, status = args  # type: ignore[assignment]
            start(*args, **kwargs).Wait(status)

        return call

    def _direct(self, name: str) -> Callable[..., Any]:
        method = getattr(self._comm, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with _door:
                result = method(*args, **kwargs)
            if name in _HANDLES and result != MPI.COMM_NULL:
                return SerialComm(result)
            if isinstance(result, MPI.Message):
                return SerialMessage(result)
            return SerialRequest(result) if isinstance(result, MPI.Request) else result

        return call


def wait_all(requests: list[Any]) -> None:
    """Wait for requests of either kind."""
    if requests and isinstance(requests[0], SerialRequest):
        for request in requests:
            request.Wait()
    else:
        MPI.Request.Waitall(requests)
