"""Messages of one object: a header with the content, then each large buffer in messages of its own.

A small object is one message. Buffers are sent from the memory of the object and received in place,
in pieces that MPI can count.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpidist.comm.execution import arguments
from mpidist.comm.execution.group_state import GroupState
from mpidist.comm.memory import buffer
from mpidist.comm.memory.buffer_pool import zeroed
from mpidist.comm.messages.matched_receive import MatchedReceive
from mpidist.comm.messages.message_entries import MessageEntries
from mpidist.comm.messages.request_work import RequestWork
from mpidist.comm.mpi import backoff, exited_ranks, trust
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import MatchedMessage
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

# Text that begins errors, timeout in seconds, world ranks that may send the message.
Limit = tuple[str, float | None, Sequence[int]]


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


class ObjectReceiver:
    """Receives the objects that other ranks send; any number of threads may call it.

    The first message of an object is matched by a probe. The others arrive in the order in which
    the sender posted them, so threads receive them in the order of their first messages.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Key: source and tag. Value: set when the receive of the last object has ended.
        self._last: dict[tuple[int, Tag], threading.Event] = {}

    def receive(
        self,
        comm: Communicator,
        source: int,
        tag: Tag,
        limit: Limit = ("", None, ()),
        wait: Callable[[MatchedReceive, memoryview, int], None] | None = None,
    ) -> tuple[bytearray, list[memoryview], int]:
        """Receive one object; return its header, its parts and the sender's rank.

        Args:
            source: A rank, or ``MPI.ANY_SOURCE``.
            limit: Bounds the wait for the first message: the text that begins errors, seconds or
                None, and world ranks; the wait ends if the programs of all of these have ended.
            wait: Waits for the request of a part; called with the request, the part's memory and
                the sender's rank. If None, the receive of each part blocks in MPI.
        """
        message, status = _matched(comm, source, comm.own_tag(tag), limit, self._lock)
        try:
            source, nbytes = status.Get_source(), status.Get_count(MPI.BYTE)
            # The size is the received message's, not one that its header announces.
            first = bytearray(nbytes)
            message.Recv((first, nbytes, MPI.BYTE))
            lengths = frame.body_lengths(first)
            header_bytes = frame.HEADER_BYTES + 8 * (len(lengths) - 1)
            body = [memoryview(first)[header_bytes:]] if nbytes > header_bytes else []
            if len(body) == len(lengths):
                return first, body, source
            key, have_arrived = (source, tag), threading.Event()
            before, self._last[key] = self._last.get(key), have_arrived
        finally:
            self._lock.release()
        try:
            if before is not None:
                before.wait()
            tag_of_parts = comm.own_tag(_TAGS_OF_PARTS[tag])
            for length in lengths[len(body) :]:
                body.append(_received(comm, length, source, tag_of_parts, wait))
            return first, body, source
        finally:
            have_arrived.set()


class ObjectMessages:
    """Messages of objects of one group."""

    def __init__(self, state: GroupState) -> None:
        self._state = state
        self._receiver = ObjectReceiver()
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
        with state.explained("recv_object", is_collective=False):
            entry = self._entries.receive_object(src)
            try:
                header, body, source = self._receiver.receive(
                    state.comm,
                    MPI.ANY_SOURCE if src is None else src,
                    Tag.OBJECT_MESSAGE,
                    (where, state.timeout_s, state.peers_of(src)),
                    self._wait_for_part,
                )
            except BaseException:
                self._entries.fail(entry)
                raise
            if src is None:
                self._entries.name_sender(entry, source)
            self._entries.end(entry)
        return accepted(where, header, body, is_data), source

    def _post(self, message: Message, dst: int) -> None:
        state, works = self._state, []
        # All parts are posted before the first wait: a wait that raises leaves none of them unsent.
        with self._posting:
            for part, tag in parts(message, Tag.OBJECT_MESSAGE):
                request = state.mpi.Isend(
                    (part, memoryview(part).nbytes, MPI.BYTE), dst, state.comm.own_tag(tag)
                )
                works.append(RequestWork(state, "send_object", None, request, dst, part))
        for work in works:
            work.wait()

    def _wait_for_part(self, request: MatchedReceive, part: memoryview, source: int) -> None:
        RequestWork(self._state, "recv_object", None, request, source, part).wait()


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


def _received(
    comm: Communicator,
    length: int,
    source: int,
    tag: int,
    wait: Callable[[MatchedReceive, memoryview, int], None] | None,
) -> memoryview:
    """Receive one part of an object."""
    part = zeroed(length)
    for start, count in buffer.pieces(length):
        piece = MatchedReceive(comm, part[start : start + count], source, tag)
        if wait is None:
            piece.receive()
        else:
            try:
                wait(piece, part, source)
            except BaseException:
                piece.post()
                raise
        piece.require_announced()
    return part


def _matched(
    comm: Communicator, source: int, tag: int, limit: Limit, lock: threading.Lock
) -> tuple[MPI.Message | MatchedMessage, MPI.Status]:
    """Wait for a message; return the matched message and its status, with the lock held."""
    # A matched probe, because no other thread can receive the message between the probe and the
    # receive (MPI-4.1 §3.8.2).
    message, status = None, MPI.Status()
    where, timeout_s, peers = limit

    def has_arrived() -> bool:
        nonlocal message
        lock.acquire()
        try:
            message = comm.mpi.Improbe(source, tag, status)
        finally:
            if message is None:
                lock.release()
        return message is not None

    def check() -> None:
        if exited_ranks.all_ended(peers):
            raise exited_ranks.failure(where, peers)

    backoff.until(has_arrived, check, timeout_s, _SPIN_S, _SPIN_S)
    if message is None:
        raise CommTimeout(f"{where}: no object came within {timeout_s:g} s")
    return message, status
