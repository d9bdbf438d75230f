"""Posted-receive queue of a group: receives of users' messages, matched in the order of posting.

A receive is passed to MPI once MPI_Improbe has matched its message and the message fits, because
Open MPI writes a longer message past the end of the receive before it reports the truncation
(``mpi/matched_probe``). Until then the receive waits in the queue of its group. The queue is probed
by a thread that waits for any message of the process, and otherwise by ``receive_poller``.

Source: MPI-4.1 §3.5 (order of messages), §3.8.2 (matched probe).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeAlias

from mpidist.comm.memory.buffer import Buffer
from mpidist.comm.memory.device_request import start_request
from mpidist.comm.memory.stream import Device
from mpidist.comm.messages import receive_poller
from mpidist.comm.messages.message_pieces import HEAD_BYTES, Head, PieceTransfers, Target
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import MatchedMessage, Mpi, Request
from mpidist.errors import GroupError

_PAUSE_S = 5e-4  # of a blocking wait between two tests
_PROBES = 8

Pattern: TypeAlias = tuple[int, int]  # source, or MPI.ANY_SOURCE, and tag


class PostedReceive:
    """One receive, with the interface of an MPI request.

    ``Test`` raises nothing; once it has returned True, ``error`` has the error.

    Attributes:
        source: The sender's rank, or ``MPI.ANY_SOURCE``.
        tag: The message's tag.
        nbytes: Length of the memory.
        number: Its place in the order of posting.
        error: The error that MPI raised, or None.
        sender: The sender's rank, once matched.
        received: Length of the message, once matched. A message longer than the memory is received
            elsewhere, and the memory is unchanged.
        space: The memory.
        device: Its device; None for the host.
        target: Device memory for pieces of a staged message, and the offset there.
    """

    __slots__ = (
        "_queue",
        "_request",
        "device",
        "error",
        "nbytes",
        "number",
        "received",
        "sender",
        "source",
        "space",
        "tag",
        "target",
    )

    def __init__(
        self,
        queue: ReceiveQueue,
        space: Buffer,
        source: int,
        tag: int,
        device: Device | None,
        target: tuple[Target, int] | None,
    ) -> None:
        self._queue = queue
        self.space = space
        self.device = device
        self.target = target
        self._request: Request | None = None
        self.source = source
        self.tag = tag
        self.nbytes = space[1]
        self.number = -1
        self.error: Exception | None = None
        self.sender = self.received = -1

    def Test(self, status: MPI.Status | None = None) -> bool:
        """See MPI_Test; ``status`` is not filled."""
        if self._request is None and self.error is None:
            self._queue.match(self)
        if self.error is not None:
            return True
        try:
            return self._request is not None and bool(self._request.Test())
        except Exception as error:
            self.error = error
            return True

    def Wait(self, status: MPI.Status | None = None) -> None:
        """See MPI_Wait."""
        while not self.Test():
            time.sleep(_PAUSE_S)

    def Cancel(self) -> None:
        """See MPI_Cancel: withdraw the receive unless it is matched."""
        self._queue.withdraw(self)

    def start(self, message: MPI.Message | MatchedMessage, sender: int, received: int) -> None:
        """Start MPI's receive of the matched message."""
        self.sender, self.received = sender, received
        space = self.space if received <= self.nbytes else (bytearray(received), received, MPI.BYTE)
        try:
            if received == HEAD_BYTES and self._queue.pieces is not None:
                self._request = self._queue.pieces.receive(self, message, sender)
            else:
                self._request = start_request(self.device, message.Irecv, space)
        except Exception as error:
            self.error = error


class ReceiveQueue:
    """The posted receives of one group that no message has matched yet.

    Args:
        mpi: The group's communicator.
        pieces: Receives messages that come in pieces; None if none do.

    Attributes:
        is_watched: See ``receive_poller``, which sets it.
    """

    def __init__(self, mpi: Mpi, pieces: PieceTransfers | None = None) -> None:
        self._mpi = mpi
        self.pieces = pieces
        # By source and tag, in the order of posting. A dict of numbers and not a deque, because a
        # receive in the middle is withdrawn in constant time.
        self._posted: dict[Pattern, OrderedDict[int, PostedReceive]] = {}
        self._posts = 0  # all receives so far; the number of the next one
        self._lock = threading.Lock()
        self._status = MPI.Status()  # guarded by the lock
        self.is_watched = False

    def post(
        self,
        space: Buffer,
        source: int,
        tag: int,
        waits: bool,
        device: Device | None = None,
        target: tuple[Target, int] | None = None,
    ) -> PostedReceive:
        """Post a receive.

        Args:
            space: Memory, its length in bytes, ``MPI.BYTE``.
            waits: The calling thread waits for the receive next, and probes the queue meanwhile.
            device: Device of the memory; None for the host.
            target: Device memory for pieces of a staged message, and the offset there.
        """
        receive = PostedReceive(self, space, source, tag, device, target)
        pattern = (source, tag)
        with self._lock:
            receive.number = self._posts
            self._posts += 1
            same = self._posted.get(pattern)
            if same is None:
                same = self._posted[pattern] = OrderedDict()
            same[receive.number] = receive
        # No probe here, which would cost as much as all else: the thread that waits probes, and
        # the poller within milliseconds.
        if not waits and not self.is_watched:
            receive_poller.watch(self)
        return receive

    def match(self, receive: PostedReceive | None = None) -> bool:
        """Start the receives whose messages have arrived; return whether any was started.

        Args:
            receive: If given, only messages of its source and tag are probed for.
        """
        if not self._posted or not self._lock.acquire(blocking=False):
            return False
        try:
            if receive is None:
                return self._match(tuple(self._posted))
            pattern = (receive.source, receive.tag)
            if len(self._posted) == 1:
                same = self._posted.get(pattern)
                if same is not None and len(same) == 1 and receive.number in same:
                    return self._match_alone(receive)
            return self._match((pattern,))
        finally:
            self._lock.release()

    def withdraw(self, receive: PostedReceive) -> None:
        """Remove a receive that no message has matched."""
        with self._lock:
            if receive.number in self._posted.get((receive.source, receive.tag), ()):
                self._fail((receive,), GroupError("the receive was withdrawn"))

    def close(self) -> None:
        """Withdraw all receives; the communicator may be freed afterwards."""
        with self._lock:
            receives = [receive for same in self._posted.values() for receive in same.values()]
            self._fail(receives, GroupError("the group was closed while a receive was posted"))
        if self.pieces is not None:
            self.pieces.close()

    def drain(self) -> list[tuple[int, int, int]]:
        """Receive messages that no receive has matched; return source, tag and length of each.

        MPICH gives the context of a freed communicator to the next one, whose receives would match
        such messages.
        """
        status, found = MPI.Status(), []
        while (message := self._mpi.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
            length, data = status.Get_count(MPI.BYTE), bytearray(status.Get_count(MPI.BYTE))
            source, tag = status.Get_source(), status.Get_tag()
            message.Recv((data, length, MPI.BYTE))
            head = Head.from_bytes(data) if length == HEAD_BYTES else None
            found.append((source, tag, length if head is None else head.nbytes))
        return found

    def is_empty(self) -> bool:
        """Return whether no receive is posted."""
        return not self._posted

    def _match_alone(self, receive: PostedReceive) -> bool:
        # The most frequent case: a thread waits for the only receive. Several probes in one call
        # save the cost of the call.
        probe, status, source, tag = self._mpi.Improbe, self._status, receive.source, receive.tag
        try:
            for _ in range(_PROBES):
                message = probe(source, tag, status)
                if message is not None:
                    self._remove(receive)
                    receive.start(message, status.Get_source(), status.Get_count(MPI.BYTE))
                    return True
        except Exception as error:
            self._fail((receive,), error)
        return False

    def _match(self, patterns: Iterable[tuple[int, int]]) -> bool:
        has_matched, status = False, self._status
        for pattern in patterns:
            # Each message goes to the first receive that accepts it, which may be an earlier one
            # for any source.
            while pattern in self._posted:
                try:
                    message = self._mpi.Improbe(*pattern, status)
                except Exception as error:
                    self._fail(tuple(self._posted[pattern].values()), error)
                    break
                if message is None:
                    break
                source, tag, length = (
                    status.Get_source(),
                    status.Get_tag(),
                    status.Get_count(MPI.BYTE),
                )
                receiver = self._first(source, tag)
                self._remove(receiver)
                receiver.start(message, source, length)
                has_matched = True
        return has_matched

    def _first(self, source: int, tag: int) -> PostedReceive:
        """Return the receive that was posted first of those that accept a message."""
        candidates = (self._posted.get((source, tag)), self._posted.get((MPI.ANY_SOURCE, tag)))
        number, same = min((next(iter(same)), same) for same in candidates if same)
        return same[number]

    def _remove(self, receive: PostedReceive) -> None:
        pattern = (receive.source, receive.tag)
        same = self._posted[pattern]
        del same[receive.number]
        if not same:
            del self._posted[pattern]

    def _fail(self, receives: Iterable[PostedReceive], error: Exception) -> None:
        for receive in receives:
            self._remove(receive)
            receive.error = error
