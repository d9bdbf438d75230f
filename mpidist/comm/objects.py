"""Collectives and messages of Python objects.

Objects travel as frames: small ones in one message, large memory (tensors, arrays) straight from
and into place, past 2 GiB in pieces. Every object call is collective over the group like its tensor
counterpart, and every call is synchronous.

A frame holds a pickle, which runs what its sender put in as it is read, or data alone: numbers,
texts, containers, tensors and arrays. Every call takes ``data_only``: None for what
``MPIDIST_TRUST`` says (``trust``), True for data, False for a pickle. Who asks for data refuses a
pickle unread (``FrameError``); what is not plain data is refused where it is given
(``NotPlainData``), and the others of a collective are told.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import profiler as torch_profiler

from mpidist.comm import arguments, profiling
from mpidist.comm.announced_receive import AnnouncedReceive
from mpidist.comm.execution import Execution
from mpidist.comm.memory import buffer
from mpidist.comm.memory.buffer_pool import zeroed
from mpidist.comm.mpi import exited_ranks, trust
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.tags import Tag
from mpidist.comm.serialization import frame
from mpidist.comm.serialization.frame import Message
from mpidist.comm.work import RequestWork
from mpidist.errors import CommTimeout, FrameError, MpidistError

_SPIN_S, _SLEEP_S = 1e-3, 50e-6  # a receive looks without pause first, then with pauses
# a frame up to this size is gathered in one collective, and sent in one message with its header
_SMALL_BYTES = 64 << 10


class Objects(Execution):
    """The object calls of a process group."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._posting_objects = threading.Lock()  # the parts of one object go out behind each other
        self._incoming = Incoming()

    def broadcast_object(
        self, obj: Any = None, src: int = 0, *, data_only: bool | None = None
    ) -> Any:
        """Give rank ``src``'s object to all; the others' argument is ignored."""
        where, is_data = self.where("broadcast_object"), trust.is_data_only(data_only)
        arguments.rank(where, src, "src", self.size)
        message, refusal = _encoded(obj, is_data) if self.rank == src else (None, None)
        result: list[Any] = []
        self._launch(
            "broadcast_object", _broadcast, (), (), (message, src, result), facts=(("src", src),)
        )
        if refusal is not None:
            raise refusal
        return obj if self.rank == src else _accepted(where, result[0], result[1:], is_data)

    def broadcast_object_list(
        self, object_list: list[Any], src: int = 0, *, data_only: bool | None = None
    ) -> None:
        """Overwrite every rank's list with rank ``src``'s."""
        object_list[:] = self.broadcast_object(object_list, src, data_only=data_only)

    def all_gather_object(self, obj: Any, *, data_only: bool | None = None) -> list[Any]:
        """Return the W ranks' objects, in rank order."""
        where, is_data = self.where("all_gather_object"), trust.is_data_only(data_only)
        (header, body), refusal = _encoded(obj, is_data)
        parts: list[Any] = []
        self._launch(
            "all_gather_object", _all_gather, (), (), (bytearray().join((header, *body)), parts)
        )
        if refusal is not None:
            raise refusal
        return [_accepted(where, *frame.parted(part), is_data) for part in parts]

    def gather_object(
        self, obj: Any, dst: int = 0, *, data_only: bool | None = None
    ) -> list[Any] | None:
        """Return the W ranks' objects on rank ``dst``, None elsewhere."""
        where, is_data = self.where("gather_object"), trust.is_data_only(data_only)
        arguments.rank(where, dst, "dst", self.size)
        message, refusal = _encoded(obj, is_data)
        bodies: list[Any] = []
        self._launch(
            "gather_object", _gather, (), (), (message, dst, bodies), facts=(("dst", dst),)
        )
        if refusal is not None:
            raise refusal
        return (
            [_accepted(where, header, body, is_data) for header, body in bodies]
            if self.rank == dst
            else None
        )

    def scatter_object(
        self,
        object_list: Sequence[Any] | None = None,
        src: int = 0,
        *,
        data_only: bool | None = None,
    ) -> Any:
        """Return the rank's object of rank ``src``'s list of W."""
        where, is_data = self.where("scatter_object"), trust.is_data_only(data_only)
        arguments.rank(where, src, "src", self.size)
        messages: list[Message] | None = None
        refusal: Exception | None = None
        if self.rank == src:
            if isinstance(object_list, (list, tuple)) and len(object_list) == self.size:
                encoded = [_encoded(obj, is_data) for obj in object_list]
                refusal = next((error for _, error in encoded if error is not None), None)
                messages = [message for message, _ in encoded]
            else:
                refusal = ValueError(
                    f"{where} needs object_list to hold {self.size} objects, one a rank"
                )
            if refusal is not None:  # told to all, not to the one whose object it is
                messages = [frame.refusal(repr(refusal))] * self.size
        came: list[Any] = []
        self._launch(
            "scatter_object", _scatter, (), (), (messages, src, came), facts=(("src", src),)
        )
        if refusal is not None:
            raise refusal
        header, body = came[0]
        return _accepted(where, header, body, is_data)

    def send_object(self, obj: Any, dst: int, *, data_only: bool | None = None) -> None:
        """Send an object to rank ``dst``; matches its ``recv_object``. Not collective.

        Blocks: until the object may be changed; for large ones, until they are received.

        Raises:
            NotPlainData: It is to travel as data, and holds something else; nothing was sent.
            CommTimeout: Not received within the group's timeout. The object is still under way.
            RankFailureError: Rank ``dst`` died, or has come to the end of its program.
        """
        send = self._send_object
        if torch_profiler._is_profiler_enabled:
            send = profiling.calling(send, self, "send_object")
        send(obj, dst, data_only)

    def _send_object(self, obj: Any, dst: int, data_only: bool | None) -> None:
        self._require_usable("send_object")
        arguments.rank(self.where("send_object"), dst, "dst", self.size)
        try:
            self._send_message(frame.encode(obj, trust.is_data_only(data_only)), dst)
        except Exception as error:
            raise self._explain(error, "send_object") from error

    def _send_message(self, message: Message, dst: int) -> None:
        works = []
        # All parts are under way before any is waited for: one that is given up must not leave the
        # others unsent.
        with self._posting_objects:
            for part, use in _parts(message, Tag.OBJECT_MESSAGE):
                request = self._mpi.Isend(
                    (part, memoryview(part).nbytes, MPI.BYTE), dst, self._comm.own_tag(use)
                )
                works.append(self._part_work("send_object", request, part, dst))
        for work in works:
            work.wait()

    def recv_object(
        self, src: int | None = None, *, data_only: bool | None = None
    ) -> tuple[Any, int]:
        """Receive an object from rank ``src`` or from any; return it and the sender's rank. Not collective.

        Raises:
            FrameError: What came is a pickle, and data is asked for; or bytes that are no object.
                The message is received.
        """
        receive = self._recv_object
        if torch_profiler._is_profiler_enabled:
            receive = profiling.calling(receive, self, "recv_object")
        return receive(src, data_only)

    def _recv_object(self, src: int | None, data_only: bool | None) -> tuple[Any, int]:
        self._require_usable("recv_object")
        is_data = trust.is_data_only(data_only)
        if src is not None:
            arguments.rank(self.where("recv_object"), src, "src", self.size)
        try:
            limit = (self.where("recv_object"), self.timeout_s, self.peers_of(src))
            source = MPI.ANY_SOURCE if src is None else src
            header, body, source = self._incoming.receive(
                self._comm, source, Tag.OBJECT_MESSAGE, limit, self._wait_for_part
            )
        except Exception as error:
            raise self._explain(error, "recv_object") from error
        return _accepted(self.where("recv_object"), header, body, is_data), source

    def _wait_for_part(self, request: Any, part: Any, source: int) -> None:
        self._part_work("recv_object", request, part, source).wait()

    def _part_work(self, operation: str, request: Any, part: Any, peer: int) -> RequestWork:
        where, peers = self.where(operation), self.peers_of(peer)
        work = RequestWork(
            operation, None, request, where, self.journal, self.timeout_s, peers=peers
        )
        work.kept = part
        return work


_PARTS_OF = {
    Tag.OBJECT_COLLECTIVE: Tag.OBJECT_COLLECTIVE_PART,
    Tag.OBJECT_MESSAGE: Tag.OBJECT_MESSAGE_PART,
}
# whose wait, seconds, and the world ranks without which nothing can come
Limit = tuple[str, float | None, Sequence[int]]


def _encoded(obj: Any, is_data: bool) -> tuple[Message, Exception | None]:
    """Return an object's message; or a refusal's, so that whoever waits for it is told, and why."""
    try:
        return frame.encode(obj, is_data), None
    except Exception as error:  # pickle raises whatever the object does
        return frame.refusal(repr(error)), error


def _accepted(where: str, header: Any, body: Sequence[Any], is_data: bool) -> Any:
    try:
        return frame.decode(header, body, is_data)
    except frame.RefusedError as refusal:
        raise MpidistError(f"{where}: a rank could not send its object: {refusal}") from None
    except FrameError as error:
        raise FrameError(f"{where}: {error}") from error


def _broadcast(
    comm: Communicator,
    inputs: Any,
    outputs: Any,
    message: Message | None,
    root: int,
    result: list[Any],
) -> None:
    if message is not None:
        header, body = message
        comm.mpi.Bcast((len(header).to_bytes(8, "little"), 8, MPI.BYTE), root)
        comm.mpi.Bcast((header, len(header), MPI.BYTE), root)
    else:
        length = bytearray(8)
        comm.mpi.Bcast((length, 8, MPI.BYTE), root)
        space = zeroed(int.from_bytes(length, "little"))
        comm.mpi.Bcast((space, len(space), MPI.BYTE), root)
        body = [zeroed(n) for n in frame.body_lengths(space)]
        result += [space, *body]
    for part in body:
        for start, count in buffer.pieces(part.nbytes):
            comm.mpi.Bcast((part[start : start + count], count, MPI.BYTE), root)


def _all_gather(
    comm: Communicator, inputs: Any, outputs: Any, data: bytearray, parts: list[Any]
) -> None:
    mine = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
    lengths = torch.empty(comm.size, dtype=torch.int64, device="cpu")
    comm.mpi.Allgather(
        buffer.as_bytes(mine), (buffer.memory(lengths.data_ptr(), lengths.nbytes), 8, MPI.BYTE)
    )
    counts = lengths.tolist()
    if min(counts) < 0:
        raise FrameError(
            f"rank {counts.index(min(counts))} announces an object of {min(counts)} bytes"
        )
    if max(counts) <= _SMALL_BYTES:
        space = bytearray(sum(counts))
        starts = [sum(counts[:i]) for i in range(comm.size)]
        comm.mpi.Allgatherv((data, len(data), MPI.BYTE), (space, (counts, starts), MPI.BYTE))
        view = memoryview(space)
        parts.extend(
            view[start : start + count] for start, count in zip(starts, counts, strict=True)
        )
        return
    for root, count in enumerate(counts):
        part = memoryview(data) if root == comm.rank else zeroed(count)
        for start, length in buffer.pieces(count):
            comm.mpi.Bcast((part[start : start + length], length, MPI.BYTE), root)
        parts.append(part)


def _gather(
    comm: Communicator, inputs: Any, outputs: Any, message: Message, root: int, bodies: list[Any]
) -> None:
    if comm.rank != root:
        _send(comm, message, root)
        return
    incoming = Incoming()
    for peer in range(comm.size):
        bodies.append(
            _copied(message)
            if peer == root
            else incoming.receive(comm, peer, Tag.OBJECT_COLLECTIVE)[:2]
        )


def _scatter(
    comm: Communicator,
    inputs: Any,
    outputs: Any,
    messages: list[Message] | None,
    root: int,
    came: list[Any],
) -> None:
    if messages is None:
        came.append(Incoming().receive(comm, root, Tag.OBJECT_COLLECTIVE)[:2])
        return
    for peer, message in enumerate(messages):
        if peer == root:
            came.append(_copied(message))
        else:
            _send(comm, message, peer)


def _send(comm: Communicator, message: Message, to: int) -> None:
    for part, use in _parts(message, Tag.OBJECT_COLLECTIVE):
        comm.mpi.Send((part, memoryview(part).nbytes, MPI.BYTE), to, comm.own_tag(use))


def _parts(message: Message, use: Tag) -> Iterator[tuple[Any, Tag]]:
    """Return the messages of an object, each with the use of its tag.

    Header and content in one message, then each buffer from its own memory.
    """
    header, body = message
    first = header + body[0] if body[0].nbytes <= _SMALL_BYTES else header
    yield first, use
    for part in body[1:] if first is not header else body:
        for start, count in buffer.pieces(part.nbytes):
            yield part[start : start + count], _PARTS_OF[use]


class Incoming:
    """Objects on their way to this rank, for any number of receiving threads.

    The first message of each object is matched by a probe; the others follow in the order in which
    the sender posted them, so that the threads receive them in the order in which they matched the
    first ones.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # (source, tag): set when the last object's parts have come
        self._last: dict[tuple[int, int], threading.Event] = {}

    def receive(
        self,
        comm: Communicator,
        source: int,
        use: Tag,
        limit: Limit = ("", None, ()),
        wait: Callable[[Any, Any, int], None] | None = None,
    ) -> tuple[Any, list[Any], int]:
        """Receive an object's header and parts; return them and the sender's rank.

        Args:
            wait: Waits for the request of a part, with the part's memory and the sender's rank; in
                MPI if None.
        """
        message, status = _matched(comm, source, comm.own_tag(use), limit, self._lock)
        try:
            source, nbytes = status.Get_source(), status.Get_count(MPI.BYTE)
            first = bytearray(nbytes)  # as many bytes as were sent, not as many as were announced
            message.Recv((first, nbytes, MPI.BYTE))
            lengths = frame.body_lengths(first)
            header_bytes = frame.HEADER_BYTES + 8 * (len(lengths) - 1)
            body: list[Any] = [memoryview(first)[header_bytes:]] if nbytes > header_bytes else []
            if len(body) == len(lengths):
                return first, body, source
            key, have_come = (source, use), threading.Event()
            before, self._last[key] = self._last.get(key), have_come
        finally:
            self._lock.release()
        try:
            if before is not None:
                before.wait()
            for length in lengths[len(body) :]:
                part = zeroed(length)
                for start, count in buffer.pieces(length):
                    piece = AnnouncedReceive(
                        comm, part[start : start + count], source, comm.own_tag(_PARTS_OF[use])
                    )
                    if wait is None:
                        piece.receive()
                    else:
                        try:
                            wait(piece, part, source)
                        except BaseException:
                            piece.post()
                            raise
                    piece.require_announced()
                body.append(part)
            return first, body, source
        finally:
            have_come.set()


def _matched(
    comm: Communicator, source: int, tag: int, limit: Limit, lock: threading.Lock
) -> tuple[Any, Any]:
    """Wait for a message; the lock is held when it is there, and only then."""
    # A matched probe: no other thread can take the message between seeing and receiving it (MPI-4.1
    # §3.8.2).
    status = MPI.Status()
    start = time.monotonic()
    where, timeout_s, peers = limit
    while True:
        lock.acquire()
        try:
            message = comm.mpi.Improbe(source, tag, status)
        except BaseException:
            lock.release()
            raise
        if message is not None:
            return message, status
        lock.release()
        waited = time.monotonic() - start
        if timeout_s is not None and waited > timeout_s:
            raise CommTimeout(f"{where}: no object came within {timeout_s:g} s")
        if waited > _SPIN_S:
            if exited_ranks.have_left(peers):
                raise exited_ranks.failure(where, peers)
            time.sleep(_SLEEP_S)


def _copied(message: Message) -> tuple[bytes, list[Any]]:
    # The root's own object must be a copy, as the others' are: no memory shared with the argument.
    header, body = message
    return header, [bytearray(part) for part in body]
