"""Point-to-point messages of one group: send, recv, isend, irecv.

Messages are not queued behind the group's collectives. They match by sender and tag in the order of
sending (MPI-4.1 §3.5); a receive may accept any sender. A thread that waits tests its request, so a
receive without a message raises ``CommTimeout`` and is withdrawn.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpidist.comm.execution import arguments, nan_check
from mpidist.comm.execution.group_state import GroupState
from mpidist.comm.memory import buffer
from mpidist.comm.memory.device_request import start_request
from mpidist.comm.memory.stream import Event
from mpidist.comm.messages import device_p2p
from mpidist.comm.messages.direct_messages import (
    DirectMessage,
    DirectMessages,
    DirectReceive,
    ends_soon,
    length_error,
)
from mpidist.comm.messages.message_entries import MessageEntries
from mpidist.comm.messages.message_pieces import PieceTransfers
from mpidist.comm.messages.posted_receives import PostedReceive, ReceiveQueue
from mpidist.comm.messages.request_work import RequestWork, orphans, release_orphans
from mpidist.comm.mpi import mpi_errors
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import Request
from mpidist.errors import CommTimeout

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


class Messages:
    """Messages of one group.

    Args:
        state: The group's state.
        checks_nan: Tensors to send are searched for NaN.

    Attributes:
        pieces: Transfers under way of long messages of device memory.
        receives: Receives that wait for their messages.
    """

    def __init__(self, state: GroupState, checks_nan: bool) -> None:
        comm = state.comm
        self._state = state
        self._comm = comm
        self._checks_nan = checks_nan
        self.pieces = PieceTransfers(comm, state.mpi)
        self.receives = ReceiveQueue(state.mpi, self.pieces)
        self._entries = MessageEntries(state.recorder, state.label, state.world_ranks)
        self._sends, self._receives = self._entries.sends, self._entries.receives
        self._direct = DirectMessages(state.mpi, comm, self._entries, is_open=not checks_nan)

    def send(self, tensor: Tensor, dst: int, tag: int) -> None:
        """Send a tensor; see ``ProcessGroup.send``."""
        self._state.require_usable("send")
        message = self._direct.take(tensor, dst, tag, self._sends, "send")
        if not message:
            self.isend("send", tensor, dst, tag).wait()
            return
        entry = message.begin(0)
        try:
            request = self._direct.start_send(message.space, dst, tag)
            if request.Test() or ends_soon(request):
                self._entries.end(entry)
                return
        except MPI.Exception as error:
            self._entries.fail(entry)
            raise self._state.message_error(error, "send") from None
        RequestWork(self._state, "send", tensor, request, dst, None, entry).wait()

    def recv(self, tensor: Tensor, src: int | None, tag: int) -> int:
        """Receive a tensor; see ``ProcessGroup.recv``."""
        self._state.require_usable("recv")
        message = self._direct.take(tensor, src, tag, self._receives, "recv")
        if message and self.receives.is_empty() and not tensor.requires_grad:
            entry = message.begin(0)
            try:
                sender = self._receive_soon(tensor, src, message)
            except BaseException:
                self._entries.fail(entry)
                raise
            if sender is not None:
                if src is None:
                    self._entries.name_sender(entry, sender)
                self._entries.end(entry)
                return sender
        else:
            entry = 0
        work = self.irecv("recv", tensor, src, tag, waits=True, entry=entry)
        try:
            work.wait()
        finally:
            work.cancel()  # no effect after the end
        return work.source_rank()

    def _receive_soon(self, tensor: Tensor, src: int | None, message: DirectMessage) -> int | None:
        """Receive a message that arrives soon; return the sender's rank, None if it is late."""
        status, (source, tag) = MPI.Status(), message.pattern
        try:
            matched = self._direct.match(source, tag, status)
            if matched is None:
                return None
            sender, received = status.Get_source(), status.Get_count(MPI.BYTE)
            if received != message.nbytes:
                # A message of another length, which is an error; or one that comes in pieces.
                receive = PostedReceive(self.receives, message.space, sender, tag, None, None)
                receive.start(matched, sender, received)
                _Receive(self._state, "recv", tensor, (receive,), src).wait()
                return sender
            request = matched.Irecv(message.space)
            if request.Test() or ends_soon(request):
                return sender
        except MPI.Exception as error:
            raise self._state.message_error(error, "recv") from None
        RequestWork(self._state, "recv", tensor, request, sender).wait()
        return sender

    def isend(self, operation: str, tensor: Tensor, dst: int, tag: int) -> RequestWork:
        """Start a send.

        Args:
            operation: The name in errors and reports.
        """
        state = self._state
        self.receives.is_in_use = True
        if state.is_closed or state.failure is not None:
            state.require_usable(operation)
        message = self._direct.take(tensor, dst, tag, self._sends, operation)
        if message:
            if orphans:
                release_orphans()
            entry = message.begin(0)
            try:
                request = self._direct.start_send(message.space, dst, tag)
            except BaseException:
                self._entries.fail(entry)
                raise
            return RequestWork(state, operation, tensor, request, dst, None, entry)
        where = state.where(operation)
        arguments.tensor(where, tensor, "tensor")
        arguments.rank(where, dst, "dst", self._state.size)
        arguments.tag(where, tag, self._comm.max_tag)
        if self._checks_nan:
            nan_check.require_none(where, (tensor,))
        release_orphans()
        entry = self._entries.send(operation, tensor, dst, tag)
        try:
            request, kept = self._start_send(tensor, dst, tag)
        except BaseException:
            self._entries.fail(entry)
            raise
        return RequestWork(state, operation, tensor, request, dst, kept, entry)

    def _start_send(self, tensor: Tensor, dst: int, tag: int) -> tuple[Request, object]:
        """Start the send of any tensor; return its request, and the memory that MPI works on."""
        staged = device_p2p.to_send_in_pieces(tensor)
        if staged is not None:
            parts = self.pieces.send(staged, list(buffer.pieces(tensor.nbytes)), dst, tag)
            if parts is not None:
                return _as_one(parts), staged
        memory, device = device_p2p.to_send(tensor)
        requests = [
            start_request(
                device, self._state.mpi.Isend, buffer.byte_range(memory, start, length), dst, tag
            )
            for start, length in buffer.pieces(memory.nbytes)
        ]
        return _as_one(requests), memory

    def irecv(
        self,
        operation: str,
        tensor: Tensor,
        src: int | None,
        tag: int,
        waits: bool = False,
        entry: int = 0,
    ) -> RequestWork:
        """Start a receive.

        Args:
            operation: The name in errors and reports.
            waits: The calling thread will wait at once.
            entry: Number of its entry in the recorder, if that has begun.
        """
        state = self._state
        if state.is_closed or state.failure is not None:
            state.require_usable(operation)
        message = self._direct.take(tensor, src, tag, self._receives, operation)
        if message and not tensor.requires_grad:
            if orphans:
                release_orphans()
            entry = entry or message.begin(0)
            receive = DirectReceive(state, operation, tensor, src, message, self.receives, entry)
            self.receives.add(receive, waits)
            return receive
        where = self._state.where(operation)
        arguments.tensor(where, tensor, "tensor")
        arguments.writable(where, tensor, "tensor")
        if src is not None:
            arguments.rank(where, src, "src", self._state.size)
        arguments.tag(where, tag, self._comm.max_tag)
        release_orphans()
        memory, device, arrive = device_p2p.to_receive(tensor)
        spans = list(buffer.pieces(memory.nbytes))
        if src is None and len(spans) > 1:
            raise ValueError(
                f"{where} from any source takes at most {buffer.MAX_COUNT} bytes; got "
                f"{memory.nbytes}; name src"
            )
        entry = entry or self._entries.receive(operation, tensor, src, tag)
        source = MPI.ANY_SOURCE if src is None else src
        target = device_p2p.target_of(arrive, tensor)
        receives = [
            self.receives.post(
                buffer.byte_range(memory, start, length),
                source,
                tag,
                waits,
                device,
                None if target is None else (target, start),
            )
            for start, length in spans
        ]
        return _Receive(self._state, operation, tensor, receives, src, memory, arrive, entry)

    def drop_unreceived(self, end: int) -> set[int]:
        """Drop the messages that have arrived, with a ResourceWarning for each of the user's.

        Called by ``ProcessGroup.close``, whose caller the warnings name.

        Args:
            end: The tag of a rank's message that it has closed the group.

        Returns:
            The ranks whose message of that tag was there.
        """
        ended = set()
        with mpi_errors.death_tolerated():
            for source, tag, length in self.receives.drain():
                if tag == end:
                    ended.add(source)
                # Messages with the library's own tags belong to calls that were refused or left.
                elif tag <= self._comm.max_tag:
                    warnings.warn(
                        f"{self._state.where('close')}: a message from rank {source} (tag {tag}, "
                        f"{length} bytes) was never received",
                        ResourceWarning,
                        3,
                    )
        return ended


class _Receive(RequestWork):
    """Handle of a receive: compares the lengths of message and tensor.

    Args:
        receives: The receives of the tensor's memory, in its order.
        arrive: Stores the message in the memory of a device, and returns the events behind which it
            is complete; None for the host.
        entry: See ``RequestWork``.
    """

    __slots__ = ("_arrive", "_receives")

    def __init__(
        self,
        state: GroupState,
        operation: str,
        tensor: Tensor,
        receives: Sequence[PostedReceive],
        src: int | None,
        memory: Tensor | None = None,
        arrive: Callable[[], Sequence[Event]] | None = None,
        entry: int = 0,
    ) -> None:
        super().__init__(state, operation, tensor, _as_one(receives), src, memory, entry)
        self._receives = receives
        self._arrive = arrive
        self._events: list[Event] = []

    def cancel(self) -> None:
        if not self._done:
            with contextlib.suppress(Exception):
                self._request.Cancel()
                self._request.Wait()
            self._done = True
            self._state.recorder.fail(self._entry)
            self._error = self._error or CommTimeout(f"{self.where} was withdrawn")

    def _store(self) -> None:
        fits = True
        for receive in self._receives:
            if receive.error is not None:
                raise receive.error
            fits = fits and receive.received == receive.nbytes
        self._source = self._receives[0].sender
        if not fits:
            received = sum(receive.received for receive in self._receives)
            raise length_error(self.where, self.tensor, self._source, received)
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
