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
from functools import partial
from itertools import repeat
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
from mpidist.comm.messages.request_work import (
    RequestWork,
    Series,
    leave,
    orphans,
    release_orphans,
)
from mpidist.comm.mpi import backoff, mpi_errors
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.mpi_errors import is_over
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
        entry, request = message.begin(0), None
        try:
            request = self._direct.start_send(message.space, dst, tag)
            if request.Test() or ends_soon(request):
                self._entries.end(entry)
                return
            work = RequestWork(self._state, "send", tensor, request, dst, None, entry)
        except MPI.Exception as error:
            self._entries.fail(entry)
            raise self._state.message_error(error, "send") from None
        except BaseException:
            self._entries.fail(entry)
            leave(request, tensor)
            raise
        work.wait()

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
        # A function of Python hands its result over without a handler of a signal in between.
        work = self.irecv("recv", tensor, src, tag, waits=True, entry=entry)
        try:
            work.wait()
        finally:
            work.cancel()  # no effect after the end
        return work.source_rank()

    def _receive_soon(self, tensor: Tensor, src: int | None, message: DirectMessage) -> int | None:
        """Receive a message that arrives soon; return the sender's rank, None if it is late."""
        status, matched, request = message.status, None, None
        try:
            matched = self._direct.match(message)
            if matched is None:
                return None
            sender, received = status.Get_source(), status.Get_count(MPI.BYTE)
            if received != message.nbytes:
                # A message of another length, which is an error; or one that comes in pieces.
                receive = PostedReceive(
                    self.receives, message.space, sender, message.pattern[1], None, None
                )
                receive.start(matched, sender, received)
                _Receive(self._state, "recv", tensor, (receive,), src).wait()
                return sender
            for request in map(matched.Irecv, message.spaces):
                if request.Test() or ends_soon(request):
                    return sender
            RequestWork(self._state, "recv", tensor, request, sender).wait()
        except MPI.Exception as error:
            raise self._state.message_error(error, "recv") from None
        except BaseException as error:
            # Of a handler of a signal, which may run behind each call of MPI.
            if not isinstance(error, MpidistError):
                self._end_left(matched, request, message, tensor, status)
            raise
        return sender

    def _end_left(
        self, matched: Any, request: Request | None, message: DirectMessage, tensor: Tensor,
        status: MPI.Status,
    ) -> None:  # fmt: skip
        """End a receive that an exception has left: a matched message is received whole."""
        space = None
        if request is None and matched is not None and matched != MPI.MESSAGE_NULL:
            if status.Get_count(MPI.BYTE) != message.nbytes:
                space = bytearray(status.Get_count(MPI.BYTE))
                request = matched.Irecv((space, len(space), MPI.BYTE))
            else:
                request = matched.Irecv(message.space)
        if request is not None:
            leave(request, (tensor, space))
            backoff.until(partial(is_over, request))

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
            entry, request = message.begin(0), None
            try:
                request = self._direct.start_send(message.space, dst, tag)
                return RequestWork(state, operation, tensor, request, dst, None, entry)
            except BaseException as error:
                self._entries.fail(entry)
                if not isinstance(error, MPI.Exception):
                    leave(request, tensor)
                raise
        self._require(state.where(operation), tensor, dst, tag, "dst")
        release_orphans()
        entry = self._entries.send(operation, tensor, dst, tag)
        try:
            request, kept = self._start_send(tensor, dst, tag)
        except BaseException:
            self._entries.fail(entry)
            raise
        return RequestWork(state, operation, tensor, request, dst, kept, entry)

    def batch(
        self,
        operations: Sequence[P2POp],
        isend: Callable[[Tensor, int, int], RequestWork],
        irecv: Callable[[Tensor, int | None, int], RequestWork],
    ) -> list[RequestWork]:
        """Start messages by the group's methods; see ``ProcessGroup.batch_isend_irecv``."""
        where = self._state.where("batch_isend_irecv")
        # All are looked at before the first is started: a batch that is refused leaves none behind.
        for each in operations:
            if each.op not in ("isend", "irecv"):
                raise ValueError(f'{where} needs op "isend" or "irecv"; got {each.op!r}')
            if each.op == "isend" and each.peer is None:
                raise ValueError(f"{where} needs a peer for a send")
            self._require(
                where, each.tensor, each.peer, each.tag, "src" if each.op == "irecv" else "dst"
            )
        works: dict[int, RequestWork] = {}
        try:
            for place, each in enumerate(operations):
                if each.op == "irecv":
                    works[place] = irecv(each.tensor, each.peer, each.tag)
            for place, each in enumerate(operations):
                if each.op == "isend":
                    assert each.peer is not None
                    works[place] = isend(each.tensor, each.peer, each.tag)
        except BaseException:
            for work in works.values():
                work.cancel()
            raise
        return [works[place] for place in range(len(operations))]

    def _require(self, where: str, tensor: Tensor, peer: int | None, tag: int, name: str) -> None:
        """Require the arguments of a message.

        Args:
            name: Of the peer: ``"dst"`` of a send, ``"src"`` of a receive.
        """
        arguments.tensor(where, tensor, "tensor")
        if name == "src":
            arguments.writable(where, tensor, "tensor")
        if peer is not None:
            arguments.rank(where, peer, name, self._state.size)
        elif tensor.nbytes > buffer.MAX_COUNT:
            raise ValueError(
                f"{where} from any source takes at most {buffer.MAX_COUNT} bytes; got "
                f"{tensor.nbytes}; name src"
            )
        arguments.tag(where, tag, self._comm.max_tag)
        if name == "dst" and self._checks_nan:
            nan_check.require_none(where, (tensor,))

    def _start_send(self, tensor: Tensor, dst: int, tag: int) -> tuple[Request, object]:
        """Start the send of any tensor; return its request, and the memory that MPI works on."""
        staged = device_p2p.to_send_in_pieces(tensor)
        if staged is not None:
            parts = self.pieces.send(staged, list(buffer.pieces(tensor.nbytes)), dst, tag)
            if parts is not None:
                return _as_one(parts), staged
        memory, device = device_p2p.to_send(tensor)
        spaces = [buffer.byte_range(memory, *span) for span in buffer.pieces(memory.nbytes)]
        # Of host memory in one call in C, within which no signal handler runs: all pieces, or none.
        start, series = self._state.mpi.Isend, Series([])
        if device is not None:
            start = partial(start_request, device, start)
        try:
            series.requests.extend(map(start, spaces, repeat(dst), repeat(tag)))
        except BaseException:
            leave(series, memory)
            raise
        return _as_one(series.requests), memory

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
            try:
                self.receives.add(receive, waits)
            except BaseException:
                receive.cancel()
                raise
            return receive
        self._require(self._state.where(operation), tensor, src, tag, "src")
        release_orphans()
        memory, device, arrive = device_p2p.to_receive(tensor)
        spans = buffer.pieces(memory.nbytes)
        entry = entry or self._entries.receive(operation, tensor, src, tag)
        source = MPI.ANY_SOURCE if src is None else src
        target = device_p2p.target_of(arrive, tensor)
        receives = [
            PostedReceive(
                self.receives,
                buffer.byte_range(memory, start, length),
                source,
                tag,
                device,
                None if target is None else (target, start),
            )
            for start, length in spans
        ]
        work = _Receive(self._state, operation, tensor, receives, src, memory, arrive, entry)
        try:
            for posted in receives:
                self.receives.add(posted, waits)
        except BaseException:
            work.cancel()
            raise
        return work

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
        self._wait_turn()
        try:
            if self._done:
                return
            with contextlib.suppress(Exception):
                self._request.Cancel()
                self._request.Wait()
            self._error = self._error or CommTimeout(f"{self.where} was withdrawn")
            self._done = True
            self._state.recorder.fail(self._entry)
        finally:
            self._turn.append(None)

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
    return requests[0] if len(requests) == 1 else Series(requests)
