"""Messages of one object: a header with the content, then each large buffer in messages of its own.

A small object is one message. Buffers are sent from the memory of the object and received in place,
in pieces that MPI can count.

The messages of an object that is sent begin in one call in C, within which no handler of a signal
runs: all or none. An object whose first message has been received is an ``Incoming``, which
``ObjectReceiver`` holds until it is complete and a call returns it. A call that is left by
``CommTimeout`` or an exception of a handler has received nothing: the next call for that sender
returns its object. Messages of two objects are not mixed, because those of one sender arrive in
order and an object receives its own behind those of the object before it.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

from mpidist.comm.execution import arguments
from mpidist.comm.execution.group_state import GroupState
from mpidist.comm.memory import buffer
from mpidist.comm.memory.buffer_pool import zeroed
from mpidist.comm.messages.matched_receive import MatchedReceive
from mpidist.comm.messages.message_entries import MessageEntries
from mpidist.comm.messages.request_work import RequestWork, Series, leave
from mpidist.comm.mpi import backoff, exited_ranks, trust
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import Mpi
from mpidist.comm.mpi.tags import Tag
from mpidist.comm.serialization import frame
from mpidist.comm.serialization.frame import Message
from mpidist.comm.serialization.tensor_format import Buffer
from mpidist.errors import CommTimeout, FrameError, MpidistError

# Longest frame that one collective gathers, and longest content in one message with its header.
SMALL_BYTES = 64 << 10

_SPIN_S = 1e-3  # of probes without a pause

_TAGS_OF_PARTS = {
    Tag.OBJECT_COLLECTIVE: Tag.OBJECT_COLLECTIVE_PART,
    Tag.OBJECT_MESSAGE: Tag.OBJECT_MESSAGE_PART,
}


def parts(message: Message, tag: Tag) -> Iterator[tuple[bytes | memoryview, Tag]]:
    """Yield the messages of an object, each with its tag."""
    header, body = message
    first = header + body[0] if body[0].nbytes <= SMALL_BYTES else header
    yield first, tag
    for part in body[1:] if first is not header else body:
        for start, count in buffer.pieces(part.nbytes):
            yield part[start : start + count], _TAGS_OF_PARTS[tag]


def send(comm: Communicator, message: Message, dst: int, tag: Tag) -> None:
    """Send an object to rank ``dst``, with a blocking call for each message."""
    for part, tag_of_part in parts(message, tag):
        nbytes = memoryview(part).nbytes
        comm.mpi.Send((part, nbytes, MPI.BYTE), dst, comm.own_tag(tag_of_part))


def copied(message: Message) -> tuple[bytes, list[bytearray]]:
    """Return a message that shares no memory with the object, as one that was received."""
    header, body = message
    return header, [bytearray(part) for part in body]


def receive(comm: Communicator, source: int, tag: Tag) -> tuple[Buffer, list[memoryview]]:
    """Receive an object, with a blocking call for each message; return its header and parts."""
    status = MPI.Status()
    message = comm.mpi.Mprobe(source, comm.own_tag(tag), status)
    first = bytearray(status.Get_count(MPI.BYTE))
    message.Recv((first, len(first), MPI.BYTE))
    incoming = Incoming(comm.mpi, first, source, comm.own_tag(_TAGS_OF_PARTS[tag]), None)
    incoming.receive()
    return incoming.content()


class Incoming:
    """Object whose first message has been received, as a request that the last part completes.

    Any thread may test it.

    Args:
        tag: The tag of the parts.
        before: The object before it of the same sender, whose parts come first.

    Attributes:
        source: The sender's rank.
        number: Its place among those that have been received.
    """

    def __init__(
        self,
        mpi: Mpi,
        first: bytearray,
        source: int,
        tag: int,
        before: Incoming | None,
        number: int = 0,
    ) -> None:
        self.source = source
        self.number = number
        self._mpi = mpi
        self._tag = tag
        self._first = first
        self._before = before
        self._lock = threading.RLock()
        self._body: list[memoryview | None] = []
        self._lengths: list[int] = []
        self._error: FrameError | None = None
        # Of the last part: the pieces that have not been received, and the receive of the first.
        self._rest: deque[tuple[int, int]] = deque()
        self._piece: MatchedReceive | None = None
        try:
            self._lengths = frame.body_lengths(first)
        except FrameError as error:
            self._error = error
            return
        header_bytes = frame.HEADER_BYTES + 8 * (len(self._lengths) - 1)
        if len(first) > header_bytes:
            self._body.append(memoryview(first)[header_bytes:])

    def is_over(self) -> bool:
        """Return whether all parts have been received."""
        return len(self._body) == len(self._lengths) and not self._rest

    def Test(self, status: MPI.Status | None = None) -> bool:
        """See MPI_Test; ``status`` is not filled."""
        with self._lock:
            if self._before is not None:
                if not self._before.Test():
                    return False
                self._before = None
            while (piece := self._current()) is not None:
                if not piece.Test():
                    return False
                self._end(piece)
            return True

    def Wait(self, status: MPI.Status | None = None) -> None:
        """See MPI_Wait."""
        backoff.until(self.Test)

    def receive(self) -> None:
        """Receive the parts with blocking calls of MPI."""
        while (piece := self._current()) is not None:
            piece.receive()
            self._end(piece)

    def content(self) -> tuple[Buffer, list[memoryview]]:
        """Return header and parts of an object that is complete.

        Raises:
            FrameError: Its messages are no object.
        """
        if self._error is not None:
            raise self._error
        return self._first, [part for part in self._body if part is not None]

    def _current(self) -> MatchedReceive | None:
        """Return the receive of the next piece; None if there is none."""
        while self._piece is None:
            if not self._rest:
                if len(self._body) == len(self._lengths):
                    return None
                length = self._lengths[len(self._body)]
                part, rest = self._space(length), deque(buffer.pieces(length))
                # Without a call, so that no handler of a signal runs in between.
                self._body += (part,)
                self._rest = rest
            start, count = self._rest[0]
            last = self._body[-1]
            space = None if last is None else last[start : start + count]
            self._piece = MatchedReceive(self._mpi, space, count, self.source, self._tag)
        return self._piece

    def _space(self, length: int) -> memoryview | None:
        try:
            return zeroed(length)
        except FrameError as error:
            # Its messages are received all the same, because others follow.
            self._error = self._error or error
            return None

    def _end(self, piece: MatchedReceive) -> None:
        self._error = self._error or piece.problem()
        # As above.
        del self._rest[0]
        self._piece = None


class ObjectReceiver:
    """Receives the objects that other ranks send; any number of threads may call it.

    Args:
        state: The group's state.
    """

    def __init__(self, state: GroupState) -> None:
        self._state = state
        self._mpi = state.mpi
        self._tag = state.comm.own_tag(Tag.OBJECT_MESSAGE)
        self._tag_of_parts = state.comm.own_tag(Tag.OBJECT_MESSAGE_PART)
        self._lock = threading.Lock()
        self._status = MPI.Status()
        self._numbers = itertools.count()
        # A first message that has been received, and its sender.
        self._first: tuple[bytearray, int] | None = None
        # Objects that no call has, in the order of their first messages; and the last of each
        # sender, unless it has been returned.
        self._objects: list[Incoming] = []
        self._last: dict[int, Incoming] = {}

    def take(self, src: int | None, where: str) -> Incoming:
        """Return an object all of whose messages have been received; the caller has it alone.

        Args:
            src: The sender's rank; None for any.
            where: Beginning of an error's text.
        """
        state, found = self._state, None
        peers, source = state.peers_of(src), MPI.ANY_SOURCE if src is None else src

        def has_come() -> bool:
            nonlocal found
            with self._lock:
                self._take(source)
                if not self._objects:
                    return False
                chosen = next((one for one in self._objects if src in (None, one.source)), None)
                rest = [one for one in self._objects if one is not chosen]
                # Without a call, as in ``Incoming``.
                self._objects, found = rest, chosen
            return found is not None

        def check() -> None:
            if exited_ranks.all_ended(peers):
                raise exited_ranks.failure(where, peers)

        try:
            if not backoff.until(has_come, check, state.timeout_s, _SPIN_S, _SPIN_S):
                raise CommTimeout(f"{where}: no object came within {state.timeout_s:g} s")
            assert found is not None
            if not found.Test():
                RequestWork(state, "recv_object", None, found, found.source).wait()
        except BaseException as error:
            if found is not None:
                self.leave(found, error)
            raise
        return found

    def leave(self, taken: Incoming, error: BaseException) -> None:
        """Give an object to the next call, unless it is the reason of the error."""
        if not isinstance(error, (MpidistError, MPI.Exception)) or isinstance(error, CommTimeout):
            with self._lock:
                # Several threads may give objects back, in any order.
                self._objects = sorted([*self._objects, taken], key=lambda one: one.number)
            return
        self.forget(taken)
        if not taken.is_over():
            leave(taken, taken)

    def _take(self, source: int) -> None:
        """Receive a first message that has arrived."""
        if self._first is None:
            if not self._mpi.Iprobe(source, self._tag, self._status):
                return
            sender, nbytes = self._status.Get_source(), self._status.Get_count(MPI.BYTE)
            # The size is the received message's, not one that its header announces.
            first = bytearray(nbytes)
            for _ in map(self._mpi.Recv, ((first, nbytes, MPI.BYTE),), (sender,), (self._tag,)):
                self._first = first, sender
            assert self._first is not None
        first, sender = self._first
        before = self._last.get(sender)
        number = next(self._numbers)
        one = Incoming(self._mpi, first, sender, self._tag_of_parts, before, number)
        # Without a call, as in ``Incoming``.
        self._objects += (one,)
        self._last |= {sender: one}
        self._first = None

    def forget(self, returned: Incoming) -> None:
        """Drop an object that a call returns."""
        with self._lock:
            # The parts of the next object come behind those of an object that is not complete.
            if self._last.get(returned.source) is returned and returned.is_over():
                del self._last[returned.source]


class ObjectMessages:
    """Messages of objects of one group."""

    def __init__(self, state: GroupState) -> None:
        self._state = state
        self._receiver = ObjectReceiver(state)
        # Held while the parts of one object are posted, which arrive in the order of posting.
        self._posting = threading.Lock()
        self._entries = MessageEntries(state.recorder, state.label, state.world_ranks)

    def send(self, obj: object, dst: int, data_only: bool | None) -> None:
        """Send an object; see ``ProcessGroup.send_object``."""
        state = self._state
        state.require_usable("send_object")
        arguments.rank(state.where("send_object"), dst, "dst", state.size)
        with state.explained("send_object", is_collective=False):
            message = header, body = frame.encode(obj, trust.is_data_only(data_only))
            entry = self._entries.send_object(
                sum([len(header), *(part.nbytes for part in body)]), dst
            )
            try:
                self._post(message, dst)
            except BaseException:
                self._entries.fail(entry)
                raise
            self._entries.end(entry)

    def receive(self, src: int | None, data_only: bool | None) -> tuple[Any, int]:
        """Receive an object; see ``ProcessGroup.recv_object``."""
        state = self._state
        state.require_usable("recv_object")
        is_data, where = trust.is_data_only(data_only), state.where("recv_object")
        if src is not None:
            arguments.rank(where, src, "src", state.size)
        entry, found, is_read = 0, None, False
        try:
            with state.explained("recv_object", is_collective=False):
                entry = self._entries.receive_object(src)
                found = self._receiver.take(src, where)
                header, body = found.content()
            is_read = True
            obj = accepted(where, header, body, is_data)
            if src is None:
                self._entries.name_sender(entry, found.source)
            self._entries.end(entry)
            self._receiver.forget(found)
        except BaseException as error:
            if found is not None:
                # An object that cannot be decoded is received: its error is the sender's.
                if is_read and isinstance(error, Exception):
                    self._receiver.forget(found)
                else:
                    self._receiver.leave(found, error)
            self._entries.fail(entry)
            raise
        return obj, found.source

    def _post(self, message: Message, dst: int) -> None:
        state, comm = self._state, self._state.comm
        buffers, tags = zip(
            *(
                ((part, memoryview(part).nbytes, MPI.BYTE), comm.own_tag(tag))
                for part, tag in parts(message, Tag.OBJECT_MESSAGE)
            ),
            strict=True,
        )
        series = Series([])
        work = RequestWork(state, "send_object", None, series, dst, buffers)
        with self._posting:
            series.requests.extend(map(state.mpi.Isend, buffers, repeat(dst), tags))
        work.wait()


def accepted(where: str, header: Buffer, body: Sequence[Buffer], is_data: bool) -> Any:
    """Return the object of a message that was received.

    Raises:
        MpidistError: The sender refused its object.
        FrameError: It is no object, or a pickle where data is asked for.
    """
    try:
        return frame.decode(header, body, is_data)
    except frame.RefusedError as refusal:
        raise MpidistError(f"{where}: a rank could not send its object: {refusal}") from None
    except FrameError as error:
        raise FrameError(f"{where}: {error}") from error
