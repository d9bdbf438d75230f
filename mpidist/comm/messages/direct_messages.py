"""Messages of plain host memory, sent and received without the objects of the general path.

A tensor that MPI can read or write in place, a valid rank and a valid tag need neither checks nor
copies. A thread that waits for its only message probes for it by itself for a short time; it
enters the group's queue of posted receives, with its watchdog, timeout and checks of the peer, only
when the message is late. The handle of a receive that is started and waited for later is its own
entry in that queue. Everything else takes the general path of ``p2p``.

Source: MPI-4.1 §3.8.2 (matched probe): the length is compared before bytes are received.
"""

from __future__ import annotations

import contextlib
import os
import time
from functools import partial
from typing import Any

import torch

from mpidist.comm.execution.group_state import GroupState
from mpidist.comm.memory import buffer
from mpidist.comm.messages.message_pieces import HEAD_BYTES
from mpidist.comm.messages.posted_receives import PostedReceive, ReceiveQueue
from mpidist.comm.messages.request_work import RequestWork
from mpidist.comm.mpi import backoff
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.mpi_errors import is_over
from mpidist.comm.mpi.nonblocking import MatchedMessage, Mpi, Request
from mpidist.dynamo import untraced
from mpidist.errors import CommTimeout, MpidistError

# A message within a node arrives within this time, or its sender is late.
_SPIN_S = 200e-6
_PROBES = 32  # between two looks at the clock, each with a yield to the sender on this core
_STRIDED = torch.strided


class DirectMessages:
    """The direct messages of one group.

    Args:
        mpi: The group's communicator.
        comm: Its size and highest tag.
        is_open: False if the values of each message are looked at before it is sent.
    """

    __slots__ = ("_byte", "_highest_tag", "_isend", "_longest", "_memory", "_probe", "_size")

    def __init__(self, mpi: Mpi, comm: Communicator, is_open: bool) -> None:
        self._size, self._highest_tag = comm.size, comm.max_tag
        self._longest = buffer.MAX_COUNT if is_open else -1  # in bytes; -1: no message is direct
        # Looked up once, because each attribute access costs 30 ns.
        self._isend, self._probe = mpi.Isend, mpi.Improbe
        self._byte, self._memory = MPI.BYTE, MPI.buffer.fromaddress

    def take(self, tensor: torch.Tensor, peer: int, tag: int) -> bool:
        """Return whether a message needs no check, no copy and one call of MPI."""
        return (
            type(tensor) is torch.Tensor
            and type(peer) is int
            and 0 <= peer < self._size
            and type(tag) is int
            and 0 <= tag <= self._highest_tag
            and tensor.is_cpu
            and tensor.layout is _STRIDED
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and not tensor.is_conj()
            and tensor.nbytes <= self._longest
        )

    def start_send(self, tensor: torch.Tensor, dst: int, tag: int) -> Request:
        """Start the send of a tensor that ``take`` accepts."""
        nbytes = tensor.nbytes
        return self._isend((self._memory(tensor.data_ptr(), nbytes), nbytes, self._byte), dst, tag)

    def match(self, src: int, tag: int, status: MPI.Status) -> MPI.Message | MatchedMessage | None:
        """Match a message that arrives soon; None if it is late.

        Args:
            src: The sender's rank, or ``MPI.ANY_SOURCE``.
            tag: The message's tag.
            status: Filled with sender and length.
        """
        probe = self._probe
        for _ in range(_PROBES):
            message = probe(src, tag, status)
            if message is not None:
                return message
        end_s = time.monotonic() + _SPIN_S
        while time.monotonic() < end_s:
            os.sched_yield()
            for _ in range(_PROBES):
                message = probe(src, tag, status)
                if message is not None:
                    return message
        return None

    def start_receive(
        self, tensor: torch.Tensor, nbytes: int, message: MPI.Message | MatchedMessage
    ) -> Request:
        """Start the receive of a matched message of the tensor's length."""
        return message.Irecv((self._memory(tensor.data_ptr(), nbytes), nbytes, self._byte))


@untraced
class DirectReceive(RequestWork):
    """Handle of a receive into plain host memory, and its entry in the queue of posted receives.

    Args:
        state: The state of the message's group.
        operation: The name of the call.
        tensor: A tensor that ``DirectMessages.take`` accepts.
        src: The sender's rank in the group; None for any.
        tag: The message's tag.
        queue: The group's queue, to which the caller adds the receive.
        entry: See ``RequestWork``.

    Attributes:
        pattern: See ``Posted``.
        number: See ``Posted``.
        error: See ``Posted``; or MPI's error.
    """

    __slots__ = ("_other", "_queue", "_sender", "error", "number", "pattern")

    def __init__(
        self,
        state: GroupState,
        operation: str,
        tensor: torch.Tensor,
        src: int | None,
        tag: int,
        queue: ReceiveQueue,
        entry: int,
    ) -> None:
        # Not super(), which costs twice as much.
        RequestWork.__init__(self, state, operation, tensor, None, src, None, entry)
        self._queue = queue
        self.pattern = (MPI.ANY_SOURCE if src is None else src, tag)
        self.number = self._sender = -1
        self.error: Exception | None = None
        # The receive of a message of another length, or of one that comes in pieces.
        self._other: PostedReceive | None = None

    def start(self, message: MPI.Message | MatchedMessage, sender: int, received: int) -> None:
        """See ``Posted``."""
        self._sender, tensor = sender, self.tensor
        try:
            if received == tensor.nbytes and received != HEAD_BYTES:
                space = MPI.buffer.fromaddress(tensor.data_ptr(), received), received, MPI.BYTE
                self._request = message.Irecv(space)
                return
            space = buffer.as_bytes(tensor)
            other = PostedReceive(self._queue, space, sender, self.pattern[1], None, None)
            other.start(message, sender, received)
            self._other = self._request = other
        except Exception as error:
            self.error = error

    def cancel(self) -> None:
        """See RequestWork.cancel."""
        if self._done:
            return
        self._queue.withdraw(self)
        if self._request is not None:
            with contextlib.suppress(Exception):
                backoff.until(partial(is_over, self._request))
        self._done = True
        self._state.recorder.fail(self._entry)
        self._error = self._error or CommTimeout(f"{self.where} was withdrawn")

    def _test(self) -> bool:
        # The steps of RequestWork._test in one call.
        if self._request is None and self.error is None:
            self._queue.match(self)
        try:
            if self.error is not None:
                raise self.error
            if self._request is None or not self._request.Test():
                return False
            self._source = self._sender
            if self._other is not None:
                self._require_length(self._other)
        except Exception as error:
            self._fail(error)
            return True
        self._done = True
        if self._peer is None:
            self._name_sender()
        self._state.recorder.end(self._entry)
        if self._future is not None:
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
