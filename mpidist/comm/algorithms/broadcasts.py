"""Broadcasts between nodes by non-blocking calls of MPI, of which several may be under way.

A broadcast begins with a head: the root's length, and the data if they fit. Longer data follow once
the head has come, so another length than the root's is an error and not overwritten memory.

MPI matches the calls of a communicator by their order on each rank. Heads go by the group's
communicator and longer data by a copy of it, and on each the broadcasts have the group's order. So
a rank may begin the heads of later broadcasts before the data of the first, and need not begin as
many as another rank: broadcasts from several roots share the network in both directions. None
begins early whose memory is that of one under way. Where an exception has left the wait for a
broadcast, its data begin with the next broadcast of the group, ahead of that one's.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from mpidist.comm.memory import buffer
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.matched_probe import LengthError
from mpidist.comm.mpi.nonblocking import Request
from mpidist.errors import GroupError

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
_FIRST = "first broadcasts"  # tensors and root of each
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

    Those queued directly behind it begin meanwhile. Where an exception of this thread, a signal
    handler's for instance, leaves the wait, the broadcast keeps its place: its data begin with the
    next broadcast.

    Raises:
        LengthError: A tensor of this rank has another length than the root's.
        GroupError: An earlier one was left within a call of MPI.
    """
    held: _Broadcasts | None = comm.kept.get(_KEPT)
    if held is None:
        held = _first(comm, tensors, root)
    if left := held.left_on(tensors):
        comm.wait_all(left)
    broadcast = held.begun_with(tensors) or held.begin(tensors, root)
    try:
        comm.wait_all([broadcast])
    finally:
        held.leave(broadcast)
    broadcast.end()


def _first(comm: Communicator, tensors: Tensors, root: int) -> _Broadcasts:
    """Make the second communicator; begin the broadcasts that were left while it was made."""
    waiting = comm.kept.setdefault(_FIRST, [])
    waiting.append((tensors, root))
    held = _Broadcasts(comm)
    comm.kept[_KEPT] = held
    for one in waiting[:-1]:
        held.leave(held.begin(*one))
    del comm.kept[_FIRST]
    return held


class _Broadcasts:
    """The broadcasts of one group that have begun and not ended, in the group's order.

    Collective: over the communicator.

    Attributes:
        failure: The error after which no data may begin, because those of a broadcast are missing
            on this rank: MPI would match later ones with them.
        is_whole: No step was left between a call of MPI and the note of it.
    """

    def __init__(self, comm: Communicator) -> None:
        self.begun: deque[Broadcast] = deque()
        # Those with heads that have not come, also where nobody waits for them any more.
        self._unread: deque[Broadcast] = deque()
        self._left: list[Broadcast] = []  # that nobody waits for, and that MPI may still work on
        self.heads: Any = comm.plain
        self.data: Any = comm.duplicate()
        self.rank = comm.rank
        self.failure: Exception | None = None
        self.is_whole = True
        self._upcoming: Upcoming = comm.kept.get(UPCOMING, lambda place: None)

    def begun_with(self, tensors: Tensors) -> Broadcast | None:
        """Return the broadcast of these tensors that has begun before its turn, or None."""
        return next((one for one in self.begun if one.tensors is tensors), None)

    def begin(self, tensors: Tensors, root: int) -> Broadcast:
        """Begin a broadcast, the last so far in the group's order."""
        self._look()
        broadcast = Broadcast(self, tensors, root)
        self.begun.append(broadcast)
        if self.failure is None:
            self._unread.append(broadcast)
            broadcast.begin()
        return broadcast

    def leave(self, broadcast: Broadcast) -> None:
        """Forget a broadcast that has ended, or that nobody waits for any more."""
        self.begun.remove(broadcast)
        if not broadcast.is_over:
            self._left.append(broadcast)
        while self._unread and not self._unread[0].heads:
            self._unread.popleft()

    def left_on(self, tensors: Tensors) -> list[Broadcast]:
        """Return those that nobody waits for, and whose data may still come into these tensors."""
        for one in self._left:
            one.end_data()
        self._left = [one for one in self._left if not one.is_over]
        return [one for one in self._left if _overlap(one.span, _span(tensors))]

    def advance(self) -> None:
        """Begin the broadcasts behind the first, and the data of those whose heads have come."""
        self._look()
        # Where none is in its turn, as in a wait for one that was left, none is behind it.
        while self.begun and self.failure is None and len(self.begun) < _MOST:
            found = self._upcoming(len(self.begun) - 1)
            # The one before it must have been read, or written, first.
            if found is None or any(
                _overlap(one.span, _span(found[0])) for one in (*self.begun, *self._left)
            ):
                break
            self.begin(*found)
        while self.failure is None and self._unread and self._unread[0].begin_data():
            self._unread.popleft()

    def _look(self) -> None:
        if not self.is_whole and self.failure is None:
            self.failure = GroupError(
                "an exception has left a broadcast of this group within a call of MPI: which data "
                "come next is unknown on this rank. Make another group"
            )


class Broadcast:
    """One broadcast on one rank; as a request, complete when its part has ended.

    Errors are raised by ``end``.

    Attributes:
        tensors: Its tensors.
        span: The first address of their memory, and the one behind it.
        heads: Requests, memory and tensors of the heads that have not come.
    """

    def __init__(self, group: _Broadcasts, tensors: Tensors, root: int) -> None:
        self.tensors = tensors
        self.span = _span(tensors)
        self.heads: deque[tuple[Request, bytearray, torch.Tensor]] = deque()
        self._group = group
        self._root = root
        # Requests of the data, at the root of the heads, too, and their memory.
        self._data: list[tuple[Request, object]] = []
        self._length_error: LengthError | None = None
        self._failure: Exception | None = group.failure

    def Test(self, status: MPI.Status | None = None) -> bool:
        """See MPI_Test; ``status`` is not filled."""
        self._group.advance()
        if self.heads and self._failure is None:
            self._failure = self._group.failure
        self._guarded(self._test_data)
        return self.is_over

    @property
    def is_over(self) -> bool:
        """Return whether it is complete, or has failed."""
        return self._failure is not None or not (self.heads or self._data)

    def begin(self) -> None:
        """Begin the heads."""
        _not_ended.add(self)
        self._guarded(self._begin)

    def begin_data(self) -> bool:
        """Begin the data whose heads have come; return whether no head is left to come."""
        self._guarded(self._read_heads)
        return not self.heads

    def end_data(self) -> None:
        """Test the data; keep the memory no longer where MPI has ended its work on it."""
        self._guarded(self._test_data)
        if self.is_over and self._failure is None:
            _not_ended.discard(self)

    def end(self) -> None:
        """Raise the error of a broadcast that is complete.

        Raises:
            LengthError: A tensor of this rank has another length than the root's.
            Exception: An error of MPI, or no memory for data of another length.
        """
        if self._failure is not None:
            raise self._failure
        self.end_data()
        if self._length_error is not None:
            raise self._length_error

    def _guarded(self, function: Callable[[], None]) -> None:
        # An error of MPI belongs to this broadcast, whichever is in its turn; all else to the
        # thread.
        if self._failure is None:
            try:
                function()
            except MPI.Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failure = error
        if (self.heads or not self._group.is_whole) and self._group.failure is None:
            self._group.failure = error

    def _begin(self) -> None:
        self._group.is_whole = False
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
            self.heads.append((request, head, tensor))
        self._group.is_whole = True

    def _read_heads(self) -> None:
        is_root = self._group.rank == self._root
        while self.heads and (is_root or self.heads[0][0].Test()):
            request, head, tensor = self.heads[0]
            (word,) = _LENGTH.unpack_from(head)
            is_inline, sent = word >= INLINE, word & ~INLINE
            fits = sent == tensor.nbytes
            if not fits and self._length_error is None:
                self._length_error = LengthError.of(self._root, sent, tensor.nbytes)
            space = tensor
            if not (fits or is_inline):
                # The other ranks wait until the data of another length are received.
                try:
                    space = torch.empty(sent, dtype=torch.uint8, device="cpu")
                except (RuntimeError, MemoryError) as error:
                    self._fail(error)
                    return
            self._group.is_whole = False
            if is_root:
                # MPI may end the send of a head late, when other data has come.
                self._data.append((request, head))
            if not is_inline:
                self._begin_data(space, sent)
            elif fits and sent and not is_root:
                data = memoryview(head)[LENGTH_BYTES : LENGTH_BYTES + sent]
                buffer.memory(tensor.data_ptr(), sent)[:] = data
            self.heads.popleft()
            self._group.is_whole = True

    def _begin_data(self, tensor: torch.Tensor, nbytes: int) -> None:
        for start, length in buffer.pieces(nbytes):
            space = buffer.byte_range(tensor, start, length)
            self._data.append((self._group.data.Ibcast(space, self._root), tensor))

    def _test_data(self) -> None:
        while self._data and not self.heads and self._data[-1][0].Test():
            self._data.pop()


def _span(tensors: Tensors) -> tuple[int, int]:
    held = [(one.data_ptr(), one.data_ptr() + one.nbytes) for one in tensors if one.nbytes]
    return min((low for low, _ in held), default=0), max((high for _, high in held), default=0)


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]
