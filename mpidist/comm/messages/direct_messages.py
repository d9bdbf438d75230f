"""Messages of plain host memory, sent and received without the objects of the general path.

A tensor that MPI can read or write in place, a valid rank and a valid tag need neither checks nor
copies. What MPI and the recorder are told of such a message is kept by the tensor's address, the
peer and the tag: a program sends the same buffers to the same neighbours again and again. A thread
that waits for its only message probes for it by itself for a short time; it enters the group's
queue of posted receives, with its watchdog, timeout and checks of the peer, only when the message
is late. The handle of a receive that is started and waited for later is its own entry in that
queue. Everything else takes the general path of ``p2p``.

Source: MPI-4.1 §3.8.2 (matched probe): the length is compared before bytes are received.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from functools import partial
from itertools import islice, repeat
from typing import Any

import torch

from mpidist.comm.execution.group_state import GroupState
from mpidist.comm.memory import buffer
from mpidist.comm.memory.buffer import Buffer
from mpidist.comm.messages.message_entries import MessageEntries
from mpidist.comm.messages.message_pieces import HEAD_BYTES
from mpidist.comm.messages.posted_receives import Pattern, PostedReceive, ReceiveQueue
from mpidist.comm.messages.request_work import RequestWork
from mpidist.comm.mpi import backoff
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.mpi_errors import is_over
from mpidist.comm.mpi.nonblocking import MatchedMessage, Mpi, Request
from mpidist.comm.recorder.ring import BeginNext
from mpidist.comm.recorder.signatures import Signatures
from mpidist.dynamo import untraced
from mpidist.errors import CommTimeout, MpidistError

# A message within a node arrives within this time, or its sender is late.
_SPIN_S = 200e-6
_PROBES = 32  # between two looks at the clock, each with a yield to the sender on this core
_STRIDED = torch.strided
_KEPT = 1 << 12  # prepared messages of a group, as signatures


class DirectMessage:
    """Prepared message of known memory, valid for tensors there of the same shape and dtype.

    Attributes:
        begin: Begins an entry in the recorder, called with 0; returns its number.
        dtype: Of the tensor.
        nbytes: Of the tensor; -1 if messages of this length may come in pieces.
        pattern: See ``posted_receives.Posted``.
        shape: Of the tensor.
        probes: Iterator of matched probes for it, which fill ``status``. Between a call and the
            storing of its result Python may run a handler of a signal, which may raise; not between
            the step of an iterator and that.
        space: The memory, as MPI is given it.
        spaces: A tuple of it, to be mapped.
        status: Sender and length of the last message that was matched.
    """

    __slots__ = (
        "begin", "dtype", "nbytes", "pattern", "probes", "shape", "space", "spaces", "status",
    )  # fmt: skip

    def __init__(
        self, tensor: torch.Tensor, address: int, pattern: Pattern, begin: BeginNext, mpi: Mpi
    ) -> None:
        nbytes = tensor.nbytes
        self.begin = begin
        self.dtype = tensor.dtype
        self.nbytes = -1 if nbytes == HEAD_BYTES else nbytes
        self.pattern = pattern
        self.shape = tensor.shape
        self.space = MPI.buffer.fromaddress(address, nbytes), nbytes, MPI.BYTE
        self.spaces = (self.space,)
        self.status = MPI.Status()
        self.probes = map(mpi.Improbe, repeat(pattern[0]), repeat(pattern[1]), repeat(self.status))


class DirectMessages:
    """The direct messages of one group.

    Args:
        mpi: The group's communicator.
        comm: Its size and highest tag.
        entries: The recorder's entries of the group's messages.
        is_open: False if the values of each message are looked at before it is sent.

    Attributes:
        start_send: Starts the send of a prepared message's ``space`` to a rank, with a tag.
    """

    __slots__ = ("_entries", "_highest_tag", "_known", "_longest", "_mpi", "_size", "start_send")

    def __init__(
        self, mpi: Mpi, comm: Communicator, entries: MessageEntries, is_open: bool
    ) -> None:
        self._size, self._highest_tag = comm.size, comm.max_tag
        self._longest = buffer.MAX_COUNT if is_open else -1  # in bytes; -1: no message is direct
        self._entries = entries
        # Looked up once, because each attribute access costs 30 ns.
        self.start_send: Callable[[Buffer, int, int], Request] = mpi.Isend
        self._mpi = mpi
        # By operation, address, peer and tag, the last of each.
        self._known: dict[tuple[str, int, int | None, int], DirectMessage] = {}

    def take(
        self, tensor: torch.Tensor, peer: int | None, tag: int, kind: Signatures, operation: str
    ) -> DirectMessage | None:
        """Return a message that needs no check, no copy and one call of MPI; None for another.

        Args:
            tensor: To send, or to receive into.
            peer: The other rank in the group; None for a receive from any.
            tag: The message's tag.
            kind: ``sends`` or ``receives`` of the group's entries.
            operation: The name of the call.
        """
        # A bool equals a rank, and is none.
        if (
            type(tensor) is not torch.Tensor
            or not (type(peer) is int or peer is None)
            or type(tag) is not int
            or not tensor.is_cpu
        ):
            return None
        try:
            address, shape = tensor.data_ptr(), tensor.shape
        except RuntimeError:  # a sparse layout, a nested tensor, or one of torch.func
            return None
        if not tensor.is_contiguous() or tensor.is_neg():
            return None
        key = (operation, address, peer, tag)
        message = self._known.get(key)
        if (
            message is None
            or message.shape != shape
            or message.dtype is not tensor.dtype
            or (message.dtype.is_complex and tensor.is_conj())
        ):
            return self._prepare(key, tensor, kind)
        return message

    def _prepare(
        self, key: tuple[str, int, int | None, int], tensor: torch.Tensor, kind: Signatures
    ) -> DirectMessage | None:
        operation, address, peer, tag = key
        if (
            not (kind is self._entries.receives if peer is None else 0 <= peer < self._size)
            or not 0 <= tag <= self._highest_tag
            or tensor.layout is not _STRIDED
            or tensor.is_conj()
            or tensor.is_quantized
            or not (address or not tensor.numel())  # without memory of its own
            or tensor.nbytes > self._longest
        ):
            return None
        begin = self._entries.prepared(kind, operation, tensor, peer, tag)
        pattern = (MPI.ANY_SOURCE if peer is None else peer, tag)
        message = DirectMessage(tensor, address, pattern, begin, self._mpi)
        if len(self._known) >= _KEPT:
            self._known.clear()
        self._known[key] = message
        return message

    def match(self, message: DirectMessage) -> MPI.Message | MatchedMessage | None:
        """Match a message that arrives soon; None if it is late."""
        probes = message.probes
        for found in islice(probes, _PROBES):
            if found is not None:
                return found
        end_s = time.monotonic() + _SPIN_S
        while time.monotonic() < end_s:
            os.sched_yield()
            for found in islice(probes, _PROBES):
                if found is not None:
                    return found
        return None


@untraced
class DirectReceive(RequestWork):
    """Handle of a receive into plain host memory, and its entry in the queue of posted receives.

    Args:
        state: The state of the message's group.
        operation: The name of the call.
        tensor: The tensor that the message was prepared for.
        src: The sender's rank in the group; None for any.
        message: The prepared message.
        queue: The group's queue, to which the caller adds the receive.
        entry: See ``RequestWork``.

    Attributes:
        pattern: See ``Posted``.
        number: See ``Posted``.
        error: See ``Posted``; or MPI's error.
    """

    __slots__ = ("_message", "_queue", "error", "number", "pattern")

    def __init__(
        self,
        state: GroupState,
        operation: str,
        tensor: torch.Tensor,
        src: int | None,
        message: DirectMessage,
        queue: ReceiveQueue,
        entry: int,
    ) -> None:
        # Not super(), which costs twice as much.
        RequestWork.__init__(self, state, operation, tensor, None, src, None, entry)
        self._queue = queue
        self._message = message
        self.pattern = message.pattern
        self.number = -1
        self.error: Exception | None = None

    def start(self, message: MPI.Message | MatchedMessage, sender: int, received: int) -> None:
        """See ``Posted``."""
        self._source, known = sender, self._message
        try:
            if received == known.nbytes:
                for request in map(message.Irecv, known.spaces):
                    self._request = request
                return
            # The receive of a message of another length, or of one that comes in pieces.
            other = PostedReceive(self._queue, known.space, sender, self.pattern[1], None, None)
            other.start(message, sender, received)
            self._kept = self._request = other
        except (MPI.Exception, MpidistError) as error:
            self.error = error

    def is_started(self) -> bool:
        """See ``Posted``."""
        return self._request is not None or self.error is not None

    def cancel(self) -> None:
        """See RequestWork.cancel."""
        self._wait_turn()
        try:
            if self._done:
                return
            self._queue.withdraw(self)
            if self._request is not None:
                with contextlib.suppress(Exception):
                    backoff.until(partial(is_over, self._request))
            self._error = self._error or CommTimeout(f"{self.where} was withdrawn")
            self._done = True
            self._state.recorder.fail(self._entry)
        finally:
            self._turn.append(None)

    def _test(self) -> bool:
        # The steps of RequestWork._test in one call.
        try:
            del self._turn[0]
        except IndexError:
            return self._done
        try:
            if self._done:
                return True
            if self._request is None and self.error is None:
                self._queue.match(self)
            if self.error is not None:
                raise self.error
            if self._request is None or not self._request.Test():
                return False
            if self._kept is not None:
                self._require_length(self._request)
            self._done = True
            if self._peer is None:
                self._name_sender()
            self._state.recorder.end(self._entry)
        except (MPI.Exception, MpidistError) as error:
            self._fail(error)
        finally:
            has_future = self._future is not None
            self._turn.append(None)
        if has_future:
            self._complete_future()
        return True

    def _require_length(self, received: PostedReceive) -> None:
        if received.error is not None:
            raise received.error
        if received.received != received.nbytes:
            raise length_error(self.where, self.tensor, received.sender, received.received)


def length_error(where: str, tensor: torch.Tensor, sender: int, received: int) -> MpidistError:
    """Return the error of a message that has another length than the tensor to receive into."""
    return MpidistError(
        f"{where} expected {tensor.nbytes} bytes (shape {tuple(tensor.shape)}, {tensor.dtype}); "
        f"rank {sender} sent {received}"
    )


def ends_soon(request: Any) -> bool:
    """Test a request for a short time; say whether it has ended.

    Raises:
        MPI.Exception: The message has failed.
    """
    test = request.Test
    for _ in range(_PROBES):
        if test():
            return True
    end_s = time.monotonic() + _SPIN_S
    while time.monotonic() < end_s:
        os.sched_yield()
        for _ in range(_PROBES):
            if test():
                return True
    return False
