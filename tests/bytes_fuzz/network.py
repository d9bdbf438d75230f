"""MPI calls of ``comm.transport`` in one process: a queue of arrivals, a list of sent messages."""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

LENGTH = struct.Struct("<I")  # of a payload


class Status:
    """A status with source and bytes."""

    def __init__(self) -> None:
        self.source = 0
        self.count = 0

    def Get_source(self) -> int:
        """Return the sender."""
        return self.source

    def Get_count(self, datatype: Any = None) -> int:
        """Return the number of bytes."""
        return self.count

    def Set_elements(self, datatype: Any, count: int) -> None:
        """Set the number of bytes."""
        self.count = count


class Done:
    """A completed request."""

    def __init__(self, source: int = 0, count: int = 0) -> None:
        self._source = source
        self._count = count

    def Test(self, status: Status | None = None) -> bool:
        """Return True."""
        if status is not None:
            status.source, status.count = self._source, self._count
        return True

    def Cancel(self) -> None:
        """Do nothing."""

    Wait = Free = Start = Cancel


class Receive(Done):
    """A receive of the next message that ``take`` returns, never past its memory's end."""

    def __init__(self, take: Callable[[], tuple[int, bytes] | None], what: Any) -> None:
        self._take = take
        self._view = memoryview(what[0] if what[0] is not None else bytearray()).cast("B")[
            : what[1]
        ]

    def Test(self, status: Status | None = None) -> bool:
        """Return whether a message has arrived; raise MPI's error if it is too long."""
        found = self._take()
        if found is None:
            return False
        source, data = found
        if len(data) > self._view.nbytes:
            raise Mpi.Exception("message truncated")
        self._view[: len(data)] = data
        if status is not None:
            status.source, status.count = source, len(data)
        return True


class Network:
    """Communicator of one rank.

    Attributes:
        arrived: (source, eager message), not received yet.
        payloads: Each payload's length u32 and its bytes; the last may have fewer.
        sent: (receiver, tag, bytes).
    """

    def __init__(self) -> None:
        self.arrived: deque[tuple[int, bytes]] = deque()
        self.payloads = b""
        self.sent: list[tuple[int, int, bytes]] = []

    def Isend(self, what: Any, to: int, tag: int) -> Done:
        """Record the message."""
        self.sent.append((to, tag, bytes(what[0])[: what[1]] if len(what) == 3 else bytes(what[0])))
        return Done()

    def Recv_init(self, what: Any, source: int, tag: int) -> Receive:
        """Return a receive of the next eager message."""
        return Receive(lambda: self.arrived.popleft() if self.arrived else None, what)

    def Irecv(self, what: Any, source: int, tag: int) -> Receive:
        """Return a receive of the next payload."""
        return Receive(lambda: self._next_payload(source), what)

    def _next_payload(self, source: int) -> tuple[int, bytes] | None:
        if len(self.payloads) < LENGTH.size:
            return None
        (nbytes,) = LENGTH.unpack_from(self.payloads)
        end = LENGTH.size + nbytes
        data, self.payloads = self.payloads[LENGTH.size : end], self.payloads[end:]
        return source, data

    def Iprobe(self, *args: Any, **options: Any) -> bool:
        """Return False: no other message waits."""
        return False


def group(network: Network, rank: int, size: int) -> Any:
    """Return the attributes of a group that ``Transport`` uses."""
    communicator = SimpleNamespace(plain=network, own_tag=lambda number: number)
    return SimpleNamespace(rank=rank, size=size, world_ranks=tuple(range(size)), _comm=communicator)


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


class Mpi:
    """The names of MPI's module that ``Transport`` uses."""

    buffer = SimpleNamespace(fromaddress=_memory)

    Status = Status
    BYTE = 0
    ANY_SOURCE = -1

    class Exception(Exception):
        """MPI's errors."""

        def Get_error_class(self) -> int:
            """Return a class that does not mean a failed process."""
            return 15

    ERR_UNKNOWN = 14
