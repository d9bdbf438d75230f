"""MPI's calls as ``comm.transport`` makes them, in one process: messages that arrive are put here, those sent are kept here."""

from __future__ import annotations

import ctypes
from collections import deque
from types import SimpleNamespace
from typing import Any


class Status:
    """A status: source and bytes."""

    def __init__(self) -> None:
        self.source = 0
        self.count = 0

    def Get_source(self) -> int:
        """Return the sender."""
        return self.source

    def Get_count(self, datatype: Any = None) -> int:
        """Return the number of bytes."""
        return self.count


class Done:
    """A request that has ended with so many bytes."""

    def __init__(self, source: int = 0, count: int = 0) -> None:
        self._source = source
        self._count = count

    def Test(self, status: Status | None = None) -> bool:
        """Say that it has."""
        if status is not None:
            status.source, status.count = self._source, self._count
        return True

    def Cancel(self) -> None:
        """Do nothing."""

    Wait = Free = Start = Cancel


class Eager(Done):
    """A persistent receive: completed by the next message that has been put."""

    def __init__(self, space: Any, network: Network) -> None:
        super().__init__()
        self._space = space
        self._network = network

    def Test(self, status: Status | None = None) -> bool:
        """Take the next message, if there is one."""
        if not self._network.arrived:
            return False
        source, data = self._network.arrived.popleft()
        self._space[: len(data)] = data
        if status is not None:
            status.source, status.count = source, len(data)
        return True


class Network:
    """The communicator of one rank.

    Attributes:
        arrived: (source, eager message), not taken up yet.
        payloads: Bytes for payloads, in order; a payload for which there are fewer gets those.
        sent: (receiver, tag, bytes).
    """

    def __init__(self) -> None:
        self.arrived: deque[tuple[int, bytes]] = deque()
        self.payloads = b""
        self.sent: list[tuple[int, int, bytes]] = []

    def Isend(self, what: Any, to: int, tag: int) -> Done:
        """Keep what is sent."""
        self.sent.append((to, tag, bytes(what[0])[: what[1]] if len(what) == 3 else bytes(what[0])))
        return Done()

    def Recv_init(self, what: Any, source: int, tag: int) -> Eager:
        """Post a receive for eager messages."""
        return Eager(what[0], self)

    def Irecv(self, what: Any, source: int, tag: int) -> Done:
        """Receive a payload: as many bytes as there are, or as there is room for."""
        view = memoryview(what[0] if what[0] is not None else bytearray()).cast("B")
        data, self.payloads = self.payloads[: view.nbytes], self.payloads[view.nbytes :]
        view[: len(data)] = data
        return Done(source, len(data))

    def Iprobe(self, *args: Any, **options: Any) -> bool:
        """Say that no other message waits."""
        return False


def group(network: Network, rank: int, size: int) -> Any:
    """Return what ``Transport`` needs of a group."""
    communicator = SimpleNamespace(plain=network, own_tag=lambda number: number)
    return SimpleNamespace(rank=rank, size=size, world_ranks=tuple(range(size)), _comm=communicator)


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


class Mpi:
    """What ``Transport`` needs of MPI's module."""

    buffer = SimpleNamespace(fromaddress=_memory)

    Status = Status
    BYTE = 0
    ANY_SOURCE = -1

    class Exception(Exception):
        """MPI's errors: none is raised here."""
