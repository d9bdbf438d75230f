"""Broadcasts between nodes by non-blocking calls of MPI, of which several may be under way.

A broadcast begins with a head: the root's length, and the data if they fit. Longer data follow once
the head has come, so another length than the root's is an error and not overwritten memory.

MPI matches the calls of a communicator by their order on each rank. Heads go by the group's
communicator and longer data by a copy of it, and on each the broadcasts have the group's order. So
a rank may begin the heads of later broadcasts before the data of the first, and need not begin as
many as another rank: broadcasts from several roots share the network in both directions.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from mpidist.comm.memory import buffer
from mpidist.comm.mpi import backoff
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.matched_probe import LengthError
from mpidist.comm.mpi.nonblocking import Request

Tensors = Sequence[torch.Tensor]
# Tensors and root of the broadcast that is queued so many places behind the one in its turn; None
# if nothing may begin there.
Upcoming: TypeAlias = Callable[[int], "tuple[Tensors, int] | None"]

# On a slow link a longer head delays short data more than a second call delays longer ones
# (docs/decisions/0001).
HEAD_BYTES = 1 << 10
LENGTH_BYTES = 8
INLINE_BYTES = HEAD_BYTES - LENGTH_BYTES
INLINE = 1 << 63  # flag in the length: the head contains the data

UPCOMING = "upcoming broadcasts"  # in Communicator.kept
_KEPT = "broadcasts"
# Broadcasts under way: a test of one advances all that MPI has begun, so many slow each other down.
_MOST = 16
_LENGTH = struct.Struct("<Q")

# MPI may write to the memory of what has not ended as long as the process lives.
_not_ended: set[Broadcast] = set()


def applies(comm: Communicator) -> bool:
    """Return whether broadcasts go by these calls; alike on all ranks.

    Not for device memory, for which MPI's blocking calls are used (``Communicator.blocking``).
    """
    return not comm.is_single_node and comm.mpi is not comm.plain


def execute(comm: Communicator, tensors: Tensors, root: int) -> None:
    """Broadcast the root's tensors, contiguous and on the host, to those of the other ranks.

    Those queued directly behind it begin meanwhile.

    Raises:
        LengthError: A tensor of this rank has another length than the root's.
    """
    held: _Broadcasts | None = comm.kept.get(_KEPT)
    if held is None:
        held = comm.kept[_KEPT] = _Broadcasts(comm)
    broadcast = held.begun_with(tensors) or held.begin(tensors, root)
    try:
        comm.wait_all([broadcast])
    finally:
        held.leave(broadcast)
    broadcast.end()


class _Broadcasts:
    """The broadcasts of one group that have begun and not ended, in the group's order.

    Collective: over the communicator.
    """

    def __init__(self, comm: Communicator) -> None:
        self.begun: deque[Broadcast] = deque()
        self._unread: deque[Broadcast] = deque()  # of these, those with heads that have not come
        self.heads: Any = comm.plain
        self.data: Any = comm.duplicate()
        self.rank = comm.rank
        self._upcoming: Upcoming = comm.kept.get(UPCOMING, lambda place: None)

    def begun_with(self, tensors: Tensors) -> Broadcast | None:
        """Return the broadcast of these tensors that has begun before its turn, or None."""
        return next((one for one in self.begun if one.tensors is tensors), None)

    def begin(self, tensors: Tensors, root: int) -> Broadcast:
        """Begin a broadcast, the last so far in the group's order."""
        broadcast = Broadcast(self, tensors, root)
        self.begun.append(broadcast)
        self._unread.append(broadcast)
        return broadcast

    def leave(self, broadcast: Broadcast) -> None:
        """Forget a broadcast that has ended, or that nobody waits for any more."""
        self.begun.remove(broadcast)
        if broadcast in self._unread:
            self._unread.remove(broadcast)

    def advance(self) -> None:
        """Begin the broadcasts behind the first, and the data of those whose heads have come."""
        while len(self.begun) < _MOST:
            found = self._upcoming(len(self.begun) - 1)
            if found is None:
                break
            self.begin(*found)
        while self._unread and self._unread[0].has_begun_data():
            self._unread.popleft()


class Broadcast:
    """One broadcast on one rank; as a request, complete when its part has ended.

    Errors are raised by ``end``.
    """

    def __init__(self, group: _Broadcasts, tensors: Tensors, root: int) -> None:
        self.tensors = tensors
        self._group = group
        self._root = root
        self._heads: deque[tuple[Request, bytearray, torch.Tensor]] = deque()
        # Requests of the data, at the root of the heads, too, and their memory.
        self._data: list[tuple[Request, object]] = []
        self._length_error: LengthError | None = None
        self._failure: Exception | None = None
        _not_ended.add(self)
        self._guarded(self._begin)

    def Test(self, status: MPI.Status | None = None) -> bool:
        """See MPI_Test; ``status`` is not filled."""
        self._group.advance()
        self._guarded(self._test_data)
        return self._failure is not None or not (self._heads or self._data)

    def Wait(self, status: MPI.Status | None = None) -> None:
        """See MPI_Wait: in MPI, or by tests if there are other broadcasts to advance."""
        if not self.Test() and len(self._group.begun) == 1:
            self._guarded(self._wait)
        else:
            backoff.until(self.Test, spin_s=0, yield_s=math.inf)

    def has_begun_data(self) -> bool:
        """Begin the data whose heads have come; return whether no head is left to come."""
        self._guarded(self._read_heads)
        return self._failure is not None or not self._heads

    def end(self) -> None:
        """Raise the error of a broadcast that is complete.

        Raises:
            LengthError: A tensor of this rank has another length than the root's.
            Exception: An error of MPI.
        """
        if self._failure is not None:
            raise self._failure
        _not_ended.discard(self)
        if self._length_error is not None:
            raise self._length_error

    def _guarded(self, function: Callable[[], None]) -> None:
        # An error belongs to this broadcast, whichever is in its turn.
        if self._failure is None:
            try:
                function()
            except Exception as error:
                self._failure = error

    def _begin(self) -> None:
        for tensor in self.tensors:
            head = bytearray(HEAD_BYTES)
            if self._group.rank == self._root:
                nbytes = tensor.nbytes
                is_inline = nbytes <= INLINE_BYTES
                _LENGTH.pack_into(head, 0, nbytes | INLINE if is_inline else nbytes)
                if is_inline and nbytes:
                    held = memoryview(buffer.memory(tensor.data_ptr(), nbytes))
                    head[LENGTH_BYTES : LENGTH_BYTES + nbytes] = held
            request = self._group.heads.Ibcast((head, HEAD_BYTES, MPI.BYTE), self._root)
            self._heads.append((request, head, tensor))

    def _read_heads(self) -> None:
        is_root = self._group.rank == self._root
        while self._heads and (is_root or self._heads[0][0].Test()):
            request, head, tensor = self._heads.popleft()
            if is_root:
                # MPI may end the send of a head late, when other data has come.
                self._data.append((request, head))
            (word,) = _LENGTH.unpack_from(head)
            is_inline, sent = word >= INLINE, word & ~INLINE
            fits = sent == tensor.nbytes
            if not fits and self._length_error is None:
                self._length_error = LengthError.of(self._root, sent, tensor.nbytes)
            if not is_inline:
                self._begin_data(tensor if fits else None, sent)
            elif fits and sent and not is_root:
                data = memoryview(head)[LENGTH_BYTES : LENGTH_BYTES + sent]
                buffer.memory(tensor.data_ptr(), sent)[:] = data

    def _begin_data(self, tensor: torch.Tensor | None, nbytes: int) -> None:
        if tensor is None:
            # The other ranks wait until the data of another length are received.
            tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        for start, length in buffer.pieces(nbytes):
            space = buffer.byte_range(tensor, start, length)
            self._data.append((self._group.data.Ibcast(space, self._root), tensor))

    def _wait(self) -> None:
        while self._heads:
            self._heads[0][0].Wait()
            self._read_heads()
        for request, _ in self._data:
            request.Wait()

    def _test_data(self) -> None:
        while self._data and not self._heads and self._data[-1][0].Test():
            self._data.pop()
