"""MPI calls of ``comm.transport`` in one process: a queue of arrivals, a list of sent messages."""

from __future__ import annotations

import ctypes
import struct
from collections import deque
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


class Truncated(Done):
    """A receive whose message is longer than its memory."""

    def Test(self, status: Status | None = None) -> bool:
        """Raise MPI's error."""
        raise Mpi.Exception("message truncated")


class Message:
    """A matched message."""

    def __init__(self, source: int, data: bytes) -> None:
        self._source = source
        self._data = data

    def Irecv(self, what: Any) -> Done:
        """Receive the message, never past the memory's end."""
        view = memoryview(what[0] if what[0] is not None else bytearray()).cast("B")[: what[1]]
        if len(self._data) > view.nbytes:
            return Truncated(self._source)
        view[: len(self._data)] = self._data
        return Done(self._source, len(self._data))


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

    def Improbe(self, source: int, tag: int, status: Status) -> Message | None:
        """Match the next eager message, or the next payload if a source is given."""
        if source == Mpi.ANY_SOURCE:
            if not self.arrived:
                return None
            status.source, data = self.arrived.popleft()
        else:
            if len(self.payloads) < LENGTH.size:
                return None
            (nbytes,) = LENGTH.unpack_from(self.payloads)
            end = LENGTH.size + nbytes
            status.source, data = source, self.payloads[LENGTH.size : end]
            self.payloads = self.payloads[end:]
        status.count = len(data)
        return Message(status.source, data)

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
