"""Point-to-point messages of a process group: send, recv, isend, irecv.

Messages are not queued behind the group's collectives. They match by sender and tag in the order of
sending (MPI-4.1 §3.5); a receive may accept any sender. A thread that waits tests its request, so a
receive without a message raises ``CommTimeout`` and is withdrawn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import profiler as torch_profiler

from mpidist.comm.execution import arguments, profiling
from mpidist.comm.execution.execution import Execution
from mpidist.comm.execution.group_settings import GroupSettings
from mpidist.comm.memory import buffer
from mpidist.comm.memory.device_request import start_request
from mpidist.comm.memory.stream import Event
from mpidist.comm.messages import device_p2p
from mpidist.comm.messages.direct_messages import DirectMessages, ends_soon
from mpidist.comm.messages.message_pieces import HEAD_BYTES, PieceTransfers
from mpidist.comm.messages.posted_receives import PostedReceive, ReceiveQueue
from mpidist.comm.messages.request_work import MessageGroup, RequestWork, release_orphans
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import Request
from mpidist.errors import CommTimeout, MpidistError

Tensor = torch.Tensor


@dataclass(frozen=True)
class P2POp:
    """One message of a batch.

    Attributes:
        op: ``"isend"`` or ``"irecv"``.
        tensor: The tensor to send, or to receive into.
        peer: The other rank in the group; None for a receive from any.
        tag: The message's tag.
    """

    op: str
    tensor: Tensor
    peer: int | None
    tag: int = 0


class PointToPoint(Execution):
    """The message calls of a process group."""

    def __init__(self, comm: Communicator, settings: GroupSettings) -> None:
        super().__init__(comm, settings)
        self._pieces = PieceTransfers(comm, self._mpi)
        self._receives = ReceiveQueue(self._mpi, self._pieces)
        self._direct = DirectMessages(self._mpi, comm, is_open=not self._checks_nan)

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send a tensor (any shape and dtype) to rank ``dst``.

        Blocks: until the tensor may be changed; for long messages, until the receive has started.

        Raises:
            CommTimeout: The group's timeout has passed.
        """
        if torch_profiler._is_profiler_enabled:
            profiling.messaging(self._send, self, "send", tensor, dst)(tensor, dst, tag)
        else:
            self._send(tensor, dst, tag)

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        """Receive into ``tensor`` from rank ``src``, or from any if None; return the sender's rank.

        Raises:
            CommTimeout: No message within the group's timeout; the receive is withdrawn.
            MpidistError: The message is longer or shorter than the tensor. A longer one does not
                change the tensor.
        """
        if torch_profiler._is_profiler_enabled:
            return profiling.messaging(self._recv, self, "recv", tensor, src)(tensor, src, tag)
        return self._recv(tensor, src, tag)

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> RequestWork:
        """Start a send; the tensor must not be changed before the handle's ``wait`` returns."""
        start = self._isend
        if torch_profiler._is_profiler_enabled:
            start = profiling.messaging(start, self, "isend", tensor, dst)
        return start("isend", tensor, dst, tag)

    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> RequestWork:
        """Start a receive; after ``wait`` the tensor holds the message.

        The handle's ``source_rank()`` then returns the sender's rank.
        """
        start = self._irecv
        if torch_profiler._is_profiler_enabled:
            start = profiling.messaging(start, self, "irecv", tensor, src)
        return start("irecv", tensor, src, tag)

    def batch_isend_irecv(self, operations: Sequence[P2POp]) -> list[RequestWork]:
        """Start messages of any order; all receives are posted before the first send."""
        for operation in operations:
            if operation.op not in ("isend", "irecv"):
                raise ValueError(
                    f'{self.where("batch_isend_irecv")} needs op "isend" or "irecv"; got '
                    f"{operation.op!r}"
                )
            if operation.op == "isend" and operation.peer is None:
                raise ValueError(f"{self.where('batch_isend_irecv')} needs a peer for a send")
        works: dict[int, RequestWork] = {}
        for place, item in enumerate(operations):
            if item.op == "irecv":
                works[place] = self.irecv(item.tensor, item.peer, item.tag)
        for place, item in enumerate(operations):
            if item.op == "isend":
                assert item.peer is not None
                works[place] = self.isend(item.tensor, item.peer, item.tag)
        return [works[place] for place in range(len(operations))]

    def _send(self, tensor: Tensor, dst: int, tag: int) -> None:
        self._require_usable("send")
        if not self._direct.take(tensor, dst, tag):
            self._isend("send", tensor, dst, tag).wait()
            return
        try:
            request = self._direct.start_send(tensor, dst, tag)
            if request.Test() or ends_soon(request):
                return
        except MPI.Exception as error:
            raise self._message_error(error, "send") from None
        RequestWork(self, "send", tensor, request, dst).wait()

    def _recv(self, tensor: Tensor, src: int | None, tag: int) -> int:
        self._require_usable("recv")
        if (
            self._receives.is_empty()
            and self._direct.take(tensor, 0 if src is None else src, tag)
            and not tensor.requires_grad
        ):
            sender = self._receive_soon(tensor, src, tag)
            if sender is not None:
                return sender
        work = self._irecv("recv", tensor, src, tag, waits=True)
        try:
            work.wait()
        finally:
            work.cancel()  # no effect after the end
        return work.source_rank()

    def _receive_soon(self, tensor: Tensor, src: int | None, tag: int) -> int | None:
        """Receive a message that arrives soon; return the sender's rank, None if it is late."""
        status = MPI.Status()
        try:
            message = self._direct.match(MPI.ANY_SOURCE if src is None else src, tag, status)
            if message is None:
                return None
            sender, received = status.Get_source(), status.Get_count(MPI.BYTE)
            if received != tensor.nbytes or received == HEAD_BYTES:
                # A message of another length, which is an error; or one that comes in pieces.
                space = buffer.as_bytes(tensor)
                receive = PostedReceive(self._receives, space, sender, tag, None, None)
                receive.start(message, sender, received)
                _Receive(self, "recv", tensor, (receive,), src).wait()
                return sender
            request = self._direct.start_receive(tensor, received, message)
            if request.Test() or ends_soon(request):
                return sender
        except MPI.Exception as error:
            raise self._message_error(error, "recv") from None
        RequestWork(self, "recv", tensor, request, sender).wait()
        return sender

    def _isend(self, operation: str, tensor: Tensor, dst: int, tag: int) -> RequestWork:
        self._require_usable(operation)
        if self._direct.take(tensor, dst, tag):
            release_orphans()
            request = self._direct.start_send(tensor, dst, tag)
            return RequestWork(self, operation, tensor, request, dst)
        where = self.where(operation)
        arguments.tensor(where, tensor, "tensor")
        arguments.rank(where, dst, "dst", self.size)
        arguments.tag(where, tag, self._comm.max_tag)
        self._require_no_nan(operation, (tensor,))
        release_orphans()
        staged = device_p2p.to_send_in_pieces(tensor)
        if staged is not None:
            parts = self._pieces.send(staged, list(buffer.pieces(tensor.nbytes)), dst, tag)
            if parts is not None:
                return RequestWork(self, operation, tensor, _as_one(parts), dst, staged)
        memory, device = device_p2p.to_send(tensor)
        requests = [
            start_request(
                device, self._mpi.Isend, buffer.byte_range(memory, start, length), dst, tag
            )
            for start, length in buffer.pieces(memory.nbytes)
        ]
        return RequestWork(self, operation, tensor, _as_one(requests), dst, memory)

    def _irecv(
        self, operation: str, tensor: Tensor, src: int | None, tag: int, waits: bool = False
    ) -> RequestWork:
        self._require_usable(operation)
        if self._direct.take(tensor, 0 if src is None else src, tag) and not tensor.requires_grad:
            release_orphans()
            source = MPI.ANY_SOURCE if src is None else src
            receive = self._receives.post(buffer.as_bytes(tensor), source, tag, waits)
            return _Receive(self, operation, tensor, (receive,), src)
        where = self.where(operation)
        arguments.tensor(where, tensor, "tensor")
        arguments.writable(where, tensor, "tensor")
        if src is not None:
            arguments.rank(where, src, "src", self.size)
        arguments.tag(where, tag, self._comm.max_tag)
        release_orphans()
        memory, device, arrive = device_p2p.to_receive(tensor)
        spans = list(buffer.pieces(memory.nbytes))
        if src is None and len(spans) > 1:
            raise ValueError(
                f"{where} from any source takes at most {buffer.MAX_COUNT} bytes; got "
                f"{memory.nbytes}; name src"
            )
        source = MPI.ANY_SOURCE if src is None else src
        target = device_p2p.target_of(arrive, tensor)
        receives = [
            self._receives.post(
                buffer.byte_range(memory, start, length),
                source,
                tag,
                waits,
                device,
                None if target is None else (target, start),
            )
            for start, length in spans
        ]
        return _Receive(self, operation, tensor, receives, src, memory, arrive)


class _Receive(RequestWork):
    """Handle of a receive: compares the lengths of message and tensor.

    Args:
        receives: The receives of the tensor's memory, in its order.
        arrive: Stores the message in the memory of a device, and returns the events behind which it
            is complete; None for the host.
    """

    __slots__ = ("_arrive", "_receives")

    def __init__(
        self,
        group: MessageGroup,
        operation: str,
        tensor: Tensor,
        receives: Sequence[PostedReceive],
        src: int | None,
        memory: Tensor | None = None,
        arrive: Callable[[], Sequence[Event]] | None = None,
    ) -> None:
        super().__init__(group, operation, tensor, _as_one(receives), src, memory)
        self._receives = receives
        self._arrive = arrive

    def cancel(self) -> None:
        if not self._done:
            with contextlib.suppress(Exception):
                self._request.Cancel()
                self._request.Wait()
            self._done = True
            self._error = self._error or CommTimeout(f"{self.where} was withdrawn")

    def _store(self) -> None:
        fits = True
        for receive in self._receives:
            if receive.error is not None:
                raise receive.error
            fits = fits and receive.received == receive.nbytes
        self._source = self._receives[0].sender
        if not fits:
            (tensor,) = self.tensors
            raise MpidistError(
                f"{self.where} expected {tensor.nbytes} bytes (shape {tuple(tensor.shape)}, "
                f"{tensor.dtype}); rank {self._source} sent "
                f"{sum(receive.received for receive in self._receives)}"
            )
        if self._arrive is not None:
            self._events += self._arrive()


def _as_one(requests: Sequence[Request]) -> Request:
    return requests[0] if len(requests) == 1 else _Series(requests)


class _Series:
    """Requests of one tensor past MPI's count limit, as one request."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests: list[Any] = list(requests)

    def Test(self, status: MPI.Status | None = None) -> bool:
        while self._requests and self._requests[0].Test(status):
            self._requests.pop(0)
        return not self._requests

    def Wait(self, status: MPI.Status | None = None) -> None:
        for request in self._requests:
            request.Wait()

    def Cancel(self) -> None:
        for request in self._requests:
            request.Cancel()
