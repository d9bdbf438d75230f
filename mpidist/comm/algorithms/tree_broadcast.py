"""Broadcast between nodes by messages: the tree of ranks, and the messages of one broadcast.

MPI's broadcasts of a communicator follow each other, and one from rank 0 to rank 1 leaves the way
back idle. A ``Transfer`` has a tag of its own, by its number in the group's order, and advances
without its rank's other calls: several broadcasts, from any roots, share the network. All ranks
need not start as many of them ahead. On few nodes MPI uses trees, too; on more it divides the data,
which fills both directions.

The first message of a tensor tells the root's length, and carries a short tensor. The receives of
the others are posted when it has come, so another length is an error and not overwritten memory.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from mpidist.comm.memory import buffer
from mpidist.comm.mpi import backoff, nonblocking
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.matched_probe import LengthError
from mpidist.comm.mpi.nonblocking import Request
from mpidist.comm.mpi.tags import BROADCAST_TAGS, Tag

_MOST_NODES = 4
# Ranks that pass data on do so by segments, from four ranks on beside the next one's arrival.
_SEGMENT_BYTES = 1 << 20
_LENGTH = struct.Struct("<Q")
_INLINE = 1 << 63  # flag in the length: the same message contains the data
INLINE_BYTES = 8 << 10
_HEAD_BYTES = _LENGTH.size + INLINE_BYTES


def applies(comm: Communicator) -> bool:
    """Return whether broadcasts go by these messages; alike on all ranks.

    Not for device memory, for which MPI's blocking calls are used (``Communicator.blocking``).
    """
    return not comm.is_single_node and comm.mpi is not comm.plain and max(comm.nodes) < _MOST_NODES


@lru_cache(256)
def tree(rank: int, root: int, nodes: tuple[int, ...]) -> tuple[int | None, tuple[int, ...]]:
    """Return the rank from which a rank receives, None at the root, and those to which it sends.

    One rank of each node, at the root's node the root, receives over the network; these are a
    binomial tree, and so are the ranks of a node.

    Args:
        rank: The rank.
        root: The root's.
        nodes: The node of each rank, numbered from 0 on.
    """
    count, first = max(nodes) + 1, nodes[root]
    leaders = [nodes.index((first + place) % count) for place in range(count)]
    leaders[0] = root
    leader = leaders[(nodes[rank] - first) % count]
    others = [other for other in range(len(nodes)) if nodes[other] == nodes[rank]]
    others.remove(leader)
    within = [leader, *others]
    parent, children = _binomial(within, rank)
    if rank == leader:
        parent, over_network = _binomial(leaders, rank)
        children = over_network + children
    return parent, tuple(children)


def _binomial(ranks: Sequence[int], rank: int) -> tuple[int | None, list[int]]:
    place, count = ranks.index(rank), len(ranks)
    reach = place & -place or 1 << (count - 1).bit_length()
    # The child with the most ranks behind it comes first.
    steps = [1 << bit for bit in reversed(range(reach.bit_length() - 1))]
    children = [ranks[place + step] for step in steps if place + step < count]
    return ranks[place & (place - 1)] if place else None, children


class Transfer:
    """Messages of one broadcast on one rank; as a request, complete when its part has ended.

    Its errors are raised by ``end``.

    Args:
        comm: The group's communicator. Each rank makes the transfers in the group's order.
        tensors: Contiguous host tensors, the root's or those to receive.
        root: The root's rank.

    Attributes:
        meanwhile: Called before each test of a wait: begins and advances others, and returns
            whether there are any; None without others.
        is_over: Nothing is left to wait for.
    """

    def __init__(self, comm: Communicator, tensors: Sequence[torch.Tensor], root: int) -> None:
        number = comm.kept["broadcasts"] = comm.kept.get("broadcasts", 0) + 1
        self.meanwhile: Callable[[], bool] | None = None
        self.is_over = False
        self._mpi = comm.plain
        self._tag = comm.own_tag(Tag.BROADCAST) + number % BROADCAST_TAGS
        self._root = root
        self._parent, self._children = tree(comm.rank, root, comm.nodes)
        # Two ranks pass nothing on.
        self._longest = _SEGMENT_BYTES if comm.size > 2 else None
        self._tensors = tensors
        self._read = 0  # tensors whose first message has come
        self._other: list[torch.Tensor] = []  # memory of data of another length
        # In the order of the messages: request, memory, and the bytes of a first message.
        self._receives: deque[tuple[Request, buffer.Buffer, bytearray | None]] = deque()
        self._sends: list[tuple[Request, buffer.Buffer]] = []
        self._error: Exception | None = None
        self._guarded(self._start)

    def Test(self, status: MPI.Status | None = None) -> bool:
        """See MPI_Test; ``status`` is not filled."""
        if self.meanwhile is not None:
            self.meanwhile()
        self._guarded(self._advance)
        return self.is_over

    def Wait(self, status: MPI.Status | None = None) -> None:
        """See MPI_Wait: in MPI, or by tests if there are other broadcasts to advance."""
        if self.meanwhile is not None and self.meanwhile():
            backoff.until(self.Test, spin_s=0, yield_s=math.inf)
        else:
            self._guarded(self._wait)

    def pass_on(self) -> bool:
        """Read what has come and send it on; return whether nothing is left but to wait."""
        self._guarded(self._receive)
        are_known = self._read == len(self._tensors)
        return not self._receives or (are_known and not self._children)

    def abandon(self) -> None:
        """Keep the memory of what MPI still works on, if the wait has not ended."""
        if not self.is_over:
            nonblocking.keep([list(self._receives), list(self._sends), self._tensors, self._other])
            self._receives.clear()
            self._sends.clear()
            self.is_over = True

    def end(self) -> None:
        """Raise the error of a broadcast that is over.

        Raises:
            LengthError: A tensor of this rank has another length than the root's.
            Exception: An error of MPI.
        """
        if self._error is not None:
            raise self._error

    def _guarded(self, function: Callable[[], object]) -> None:
        try:
            if not self.is_over:
                function()
        except Exception as error:
            self._error = error
            self.abandon()

    def _start(self) -> None:
        if self._parent is not None:
            if self._tensors:
                self._expect_head()
            return
        for tensor in self._tensors:
            nbytes = tensor.nbytes
            if nbytes <= INLINE_BYTES:
                data = memoryview(buffer.memory(tensor.data_ptr(), nbytes)) if nbytes else b""
                head = bytearray(_LENGTH.pack(nbytes | _INLINE)) + data
            else:
                head = bytearray(_LENGTH.pack(nbytes))
            self._send((head, len(head), MPI.BYTE))
            if nbytes > INLINE_BYTES:
                for start, length in buffer.pieces(nbytes, self._longest):
                    self._send(buffer.byte_range(tensor, start, length))

    def _advance(self) -> None:
        self._receive()
        while self._sends and not self._receives and self._sends[-1][0].Test():
            self._sends.pop()
        self.is_over = not self._receives and not self._sends

    def _wait(self) -> None:
        while self._receives:
            self._receives[0][0].Wait()
            self._arrived()
        for request, _ in self._sends:
            request.Wait()
        self._sends.clear()
        self.is_over = True

    def _receive(self) -> None:
        # One after the other, so that every rank sends them on in their order.
        while self._receives and self._receives[0][0].Test():
            self._arrived()

    def _arrived(self) -> None:
        _, space, head = self._receives.popleft()
        if head is None:
            self._send(space)
            return
        tensor = self._tensors[self._read]
        self._read += 1
        (word,) = _LENGTH.unpack_from(head)
        is_inline, sent = word >= _INLINE, word & ~_INLINE
        end = _LENGTH.size + (sent if is_inline else 0)
        self._send((head, end, MPI.BYTE))
        fits = sent == tensor.nbytes
        if not fits and self._error is None:
            self._error = LengthError.of(self._root, sent, tensor.nbytes)
        if is_inline:
            if fits and sent:
                buffer.memory(tensor.data_ptr(), sent)[:] = memoryview(head)[_LENGTH.size : end]
        else:
            if not fits:
                tensor = torch.empty(sent, dtype=torch.uint8, device="cpu")
                self._other.append(tensor)
            for start, length in buffer.pieces(sent, self._longest):
                self._expect(buffer.byte_range(tensor, start, length))
        if self._read < len(self._tensors):
            self._expect_head()

    def _expect_head(self) -> None:
        head = bytearray(_HEAD_BYTES)
        self._expect((head, _HEAD_BYTES, MPI.BYTE), head)

    def _expect(self, space: buffer.Buffer, head: bytearray | None = None) -> None:
        request = self._mpi.Irecv(space, self._parent, self._tag)
        self._receives.append((request, space, head))

    def _send(self, space: buffer.Buffer) -> None:
        for child in self._children:
            self._sends.append((self._mpi.Isend(space, child, self._tag), space))
