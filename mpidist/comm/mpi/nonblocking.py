"""Non-blocking MPI calls in place of blocking ones: between nodes, and where waits may end early.

A synchronous call on one rank matches an asynchronous one on another, but MPI does not match a
blocking collective with a non-blocking one (MPI-4.1 §6.12): between nodes all are non-blocking.
Waits differ. The caller's thread tests without sleeping, in Python, which runs the program's signal
handlers meanwhile. A group's own thread runs during the backward pass, where polling would take
half of a core, so it sleeps between tests: 50 µs, and up to a millisecond in a wait of many; a
transfer between nodes takes milliseconds.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from mpidist.comm.mpi import backoff
from mpidist.comm.mpi.library import MPI

if TYPE_CHECKING:
    from mpi4py.typing import BufSpec

# With sleeps of 50 µs alone a wait on MPI over TCP takes 0.3 of a core (docs/decisions/0005).
_LONGEST_SLEEP_S = 1e-3
# Blocking calls whose non-blocking form takes the same arguments, except for a status.
NONBLOCKING = {
    name: "I" + name.lower()
    for name in (
        "Allreduce", "Reduce", "Bcast", "Barrier", "Allgather", "Allgatherv", "Gather",
        "Gatherv", "Scatter", "Scatterv", "Alltoall", "Alltoallv", "Reduce_scatter_block",
        "Reduce_scatter", "Send", "Ssend", "Recv",
    )
}  # fmt: skip

# Requests that nobody waits for and their memory: MPI may write there as long as the process lives.
_abandoned: list[object] = []


class Request(Protocol):
    """The calls of an MPI request, also of requests that this library makes."""

    def Test(self, status: MPI.Status | None = None) -> bool:
        """See MPI_Test."""

    def Wait(self, status: MPI.Status | None = None) -> object:
        """See MPI_Wait."""


Wait: TypeAlias = "Callable[[Request | _Probe, MPI.Status | None], None]"
# A communicator that executors call; as text, because a name of MPI starts MPI.
Mpi: TypeAlias = "MPI.Comm | MpiCalls"


class MpiCalls:
    """A communicator whose blocking calls are a non-blocking call and a wait.

    All other calls are the communicator's own.

    Args:
        comm: The communicator that is called.
        wait: Called with a request and a status or None; returns when the request is complete.
        check: Called before each ``Improbe``; raises to end a loop of probes.
    """

    def __init__(self, comm: Mpi, wait: Wait, check: Callable[[], None] | None = None) -> None:
        self._comm = comm
        self._wait = wait
        self._check = check

    def __getattr__(self, name: str) -> Any:
        call = self._waiting(name) if name in NONBLOCKING else getattr(self._comm, name)
        self.__dict__[name] = call
        return call

    @property
    def is_abandonable(self) -> bool:
        """Return whether a wait may end by an error while MPI still works on its request."""
        return self._check is not None

    def Sendrecv(
        self,
        send: BufSpec,
        dest: int,
        sendtag: int,
        recv: BufSpec,
        source: int,
        recvtag: int,
        status: MPI.Status | None = None,
    ) -> None:
        """See MPI_Sendrecv."""
        incoming = self._comm.Irecv(recv, source, recvtag)
        outgoing = self._comm.Isend(send, dest, sendtag)
        self._wait(incoming, status)
        self._wait(outgoing, None)

    def Mprobe(self, source: int, tag: int, status: MPI.Status | None = None) -> MatchedMessage:
        """See MPI_Mprobe."""
        probe = _Probe(self._comm, source, tag)
        self._wait(probe, status)
        return MatchedMessage(probe.message, self._wait)

    def Improbe(
        self, source: int, tag: int, status: MPI.Status | None = None
    ) -> MatchedMessage | None:
        """See MPI_Improbe."""
        if self._check is not None:
            self._check()
        message = self._comm.Improbe(source, tag, status)
        return None if message is None else MatchedMessage(message, self._wait)

    def over(self, comm: Mpi) -> MpiCalls:
        """Return another communicator with the same waits."""
        return MpiCalls(comm, self._wait, self._check)

    def wait_all(self, requests: Iterable[Request]) -> None:
        """Wait for requests of this communicator."""
        for request in requests:
            self._wait(request, None)

    def _waiting(self, name: str) -> Callable[..., None]:
        start, wait = getattr(self._comm, NONBLOCKING[name]), self._wait
        takes_status = name == "Recv"

        def call(*args: Any, **kwargs: Any) -> None:
            status = kwargs.pop("status", None)
            if takes_status and len(args) == 4:
                *args, status = args  # type: ignore[assignment]
            wait(start(*args, **kwargs), status)

        return call


class MatchedMessage:
    """A matched message whose blocking receive is a non-blocking one and a wait."""

    __slots__ = ("_message", "_wait")

    def __init__(self, message: MPI.Message | MatchedMessage, wait: Wait) -> None:
        self._message = message
        self._wait = wait

    def Recv(self, space: BufSpec) -> None:
        """See MPI_Mrecv."""
        self._wait(self._message.Irecv(space), None)

    def Irecv(self, space: BufSpec) -> Request:
        """See MPI_Imrecv."""
        return self._message.Irecv(space)


class _Probe:
    """A matched probe as a request that completes when a message is matched.

    Attributes:
        message: The matched message, None before.
    """

    __slots__ = ("_comm", "_source", "_tag", "message")

    def __init__(self, comm: Mpi, source: int, tag: int) -> None:
        self._comm = comm
        self._source = source
        self._tag = tag
        self.message: Any = None

    def Test(self, status: MPI.Status | None) -> bool:
        self.message = self._comm.Improbe(self._source, self._tag, status)
        return self.message is not None

    def Wait(self, status: MPI.Status | None) -> None:
        self.message = self._comm.Mprobe(self._source, self._tag, status)


def wait_spinning(request: Request | _Probe, status: MPI.Status | None = None) -> None:
    """Test a request until it is complete; let other threads and processes run between tests."""
    backoff.until(lambda: request.Test(status), yield_s=math.inf)


def wait_sleeping(request: Request | _Probe, status: MPI.Status | None = None) -> None:
    """Test a request until it is complete; yield the core between tests, later sleep."""
    backoff.until(lambda: request.Test(status), longest_s=_LONGEST_SLEEP_S)


def wait_abandonable(check: Callable[[], None], sleeps: bool) -> Wait:
    """Return a wait that ``check`` ends by raising; MPI keeps the request.

    Args:
        check: Raises if the group has failed.
        sleeps: Sleep between tests, for a thread that runs during the computation.
    """
    yield_s = backoff.YIELD_S if sleeps else math.inf

    def wait(request: Request | _Probe, status: MPI.Status | None = None) -> None:
        backoff.until(
            lambda: request.Test(status), check, yield_s=yield_s, longest_s=_LONGEST_SLEEP_S
        )

    return wait


def abandonable(comm: Mpi, check: Callable[[], None], sleeps: bool) -> MpiCalls:
    """Return a communicator whose waits end when ``check`` raises; see ``wait_abandonable``."""
    return MpiCalls(comm, wait_abandonable(check, sleeps), check)


def keep(requests: Iterable[object]) -> None:
    """Keep alive requests that nobody waits for, and their buffers."""
    _abandoned.extend(requests)


def keep_memory_of(error: BaseException, *held: object) -> None:
    """Keep alive what MPI may use of an operation that an exception has left before its end.

    Args:
        error: Being handled by the operation's executor: the local variables of the frames that it
            has left are requests and memory of their own.
        held: The operation's tensors, and owners of other memory.
    """
    frames = [dict(frame.f_locals) for frame, _ in traceback.walk_tb(error.__traceback__)]
    _abandoned.append((frames, held))
