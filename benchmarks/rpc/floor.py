"""Lower bound of a call: the smallest request and response in Python over mpi4py.

``Floor`` pickles a function by name with its arguments, dispatches by message kind, keeps a table
of pending calls with deadlines, and polls persistent receives: the minimum of any RPC layer. One
thread per process does all of this: the callee's thread polls and runs functions inline, the
caller's thread polls while waiting. ``round_trip`` is plain MPI.

The import starts MPI, so call ``mpidist.comm.init()`` first.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

CALL, ANSWER, ERROR, LEAVE = range(4)
_RECEIVES, _MOST_BYTES = 4, 32 << 10
_TIMEOUT_S = 60.0
_TAG, _LAST_TAG = 1, 2


class Floor:
    """One process's endpoint, on a duplicate of a communicator.

    Collective: construction and ``close``.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm.Dup()
        self._buffers = [memoryview(bytearray(_MOST_BYTES)) for _ in range(_RECEIVES)]
        ends = (MPI.ANY_SOURCE, _TAG)
        self._receives = [self._comm.Recv_init([own, MPI.BYTE], *ends) for own in self._buffers]
        MPI.Prequest.Startall(self._receives)
        # MPI fills the receives in the order of their start.
        self._oldest = 0
        self._status = MPI.Status()
        self._sends: deque[tuple[MPI.Request, bytes]] = deque()
        self._pending: dict[int, float] = {}  # deadline by call number
        self._results: dict[int, tuple[int, Any]] = {}
        self._number = 0
        self._serving = False
        self._handlers = (self._call, self._end_call, self._end_call, self._leave)

    def rpc_sync(
        self, to: int, function: Callable[..., Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function on rank ``to`` and return its result."""
        self._number = number = self._number + 1
        deadline = self._pending[number] = time.monotonic() + _TIMEOUT_S
        self._send(to, CALL, number, (function, args, kwargs or {}))
        while number in self._pending:
            if not self._poll() and time.monotonic() > deadline:
                del self._pending[number]
                raise TimeoutError(f"rank {to} did not answer within {_TIMEOUT_S:g} s")
        kind, result = self._results.pop(number)
        if kind == ERROR:
            raise result
        return result

    def serve(self) -> None:
        """Answer calls until another rank calls ``leave``."""
        self._serving = True
        while self._serving:
            self._poll()

    def leave(self, to: int) -> None:
        """End ``serve`` on rank ``to``."""
        self._send(to, LEAVE, 0, None)

    def close(self) -> None:
        for request, _ in self._sends:
            request.Wait()
        self._comm.Barrier()
        for receive in self._receives:
            receive.Cancel()
            receive.Wait()
            receive.Free()
        self._comm.Free()

    def _send(self, to: int, kind: int, number: int, body: Any) -> None:
        data = pickle.dumps((kind, number, body), pickle.HIGHEST_PROTOCOL)
        self._sends.append((self._comm.Isend([data, MPI.BYTE], to, _TAG), data))
        while self._sends and self._sends[0][0].Test():
            self._sends.popleft()

    def _poll(self) -> bool:
        """Handle at most one message; return whether one had arrived."""
        place, status = self._oldest, self._status
        if not self._receives[place].Test(status):
            return False
        source, count = status.Get_source(), status.Get_count(MPI.BYTE)
        kind, number, body = pickle.loads(self._buffers[place][:count])
        self._receives[place].Start()
        self._oldest = (place + 1) % _RECEIVES
        self._handlers[kind](source, kind, number, body)
        return True

    def _call(self, source: int, kind: int, number: int, body: Any) -> None:
        function, args, kwargs = body
        try:
            answer, result = ANSWER, function(*args, **kwargs)
        except Exception as error:
            answer, result = ERROR, error
        self._send(source, answer, number, result)

    def _end_call(self, source: int, kind: int, number: int, body: Any) -> None:
        # A call without an entry has timed out.
        if self._pending.pop(number, None) is not None:
            self._results[number] = kind, body

    def _leave(self, source: int, kind: int, number: int, body: Any) -> None:
        self._serving = False


def round_trip(
    comm: MPI.Comm, to: int, memory: np.ndarray[Any, Any], back: np.ndarray[Any, Any]
) -> None:
    """Send memory to a rank in ``bounce`` and receive as much."""
    comm.Send([memory, MPI.BYTE], to, _TAG)
    comm.Recv([back, MPI.BYTE], to, _TAG)


def bounce(comm: MPI.Comm, source: int, memory: np.ndarray[Any, Any]) -> None:
    """Receive into ``memory`` and send it back, until ``end_bounce``."""
    status = MPI.Status()
    comm.Recv([memory, MPI.BYTE], source, MPI.ANY_TAG, status)
    while status.Get_tag() != _LAST_TAG:
        comm.Send([memory, MPI.BYTE], source, _TAG)
        comm.Recv([memory, MPI.BYTE], source, MPI.ANY_TAG, status)


def end_bounce(comm: MPI.Comm, to: int) -> None:
    comm.Send([b"", MPI.BYTE], to, _LAST_TAG)
