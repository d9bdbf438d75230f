"""Posted-receive queue of a group: receives of users' messages, matched in the order of posting.

A receive is passed to MPI once MPI_Improbe has matched its message and the message fits, because
Open MPI writes a longer message past the end of the receive before it reports the truncation
(``mpi/matched_probe``). Until then the receive waits in the queue of its group. The queue is probed
by a thread that waits for any message of the process, and otherwise by ``receive_poller``.

A probe for one source and tag searches MPI's list of unexpected messages, which is long where many
receives are posted and the messages come in another order. With many receives the queue asks for
any message (``MPI_Iprobe``, which takes none) and finds its receive in a table: a message then
costs the same however many receives are posted.

Source: MPI-4.1 §3.5 (order of messages), §3.8.2 (matched probe).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator
from itertools import repeat
from typing import Protocol, TypeAlias

from mpidist.comm.memory.buffer import Buffer
from mpidist.comm.memory.device_request import start_request
from mpidist.comm.memory.stream import Device
from mpidist.comm.messages import receive_poller
from mpidist.comm.messages.message_pieces import HEAD_BYTES, Head, PieceTransfers, Target
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import MatchedMessage, Mpi, Request
from mpidist.errors import GroupError, MpidistError

_PAUSE_S = 5e-4  # of a blocking wait between two tests
_PROBES = 8
# Up to so many sources and tags a round probes for each of them.
_FEW_PATTERNS = 4
# Above so many, a thread that waits for one message starts the receives of all that have arrived.
_MANY_PATTERNS = 64
_KEPT = 1 << 12  # iterators of probes

Pattern: TypeAlias = tuple[int, int]  # source, or MPI.ANY_SOURCE, and tag


class Posted(Protocol):
    """Receive that waits in a queue for its message.

    Attributes:
        pattern: The sender's rank, or ``MPI.ANY_SOURCE``; and the message's tag.
        number: Its place in the order of posting; -1 outside the queue.
        error: Set if no message will come.
    """

    pattern: Pattern
    number: int
    error: Exception | None

    def start(self, message: MPI.Message | MatchedMessage, sender: int, received: int) -> None:
        """Start MPI's receive of the matched message, ``received`` bytes long; raise nothing."""

    def is_started(self) -> bool:
        """Return whether MPI's receive has been started, or has failed."""


class PostedReceive:
    """One receive, with the interface of an MPI request.

    ``Test`` raises nothing; once it has returned True, ``error`` has the error.

    Attributes:
        pattern: See ``Posted``.
        nbytes: Length of the memory.
        number: See ``Posted``.
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
        "pattern",
        "received",
        "sender",
        "space",
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
        self.pattern = (source, tag)
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
        except (MPI.Exception, MpidistError) as error:
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
            elif self.device is None:
                for request in map(message.Irecv, (space,)):
                    self._request = request
            else:
                self._request = start_request(self.device, message.Irecv, space)
        except (MPI.Exception, MpidistError) as error:
            self.error = error
        # An error of CUDA. Those of the library are the message's.
        except RuntimeError as error:
            self.error = MpidistError(f"the receive of a message on a device failed: {error}")

    def is_started(self) -> bool:
        """See ``Posted``."""
        return self._request is not None or self.error is not None


class ReceiveQueue:
    """The posted receives of one group that no message has matched yet.

    Args:
        mpi: The group's communicator.
        pieces: Receives messages that come in pieces; None if none do.

    Attributes:
        is_watched: See ``receive_poller``, which sets it.
        is_in_use: See ``receive_poller``, which clears it; set by each call of a message.
    """

    def __init__(self, mpi: Mpi, pieces: PieceTransfers | None = None) -> None:
        self._mpi = mpi
        self.pieces = pieces
        # By source and tag, in the order of posting. A receive that is withdrawn from the middle
        # stays until those before or behind it have gone; the first and the last are never such.
        self._posted: dict[Pattern, deque[Posted]] = {}
        self._has_any_source = False  # a receive from any source was ever posted
        self._lock = threading.Lock()
        # Looked up once, because each attribute access in a message's path costs 30 ns.
        self._leave = self._lock.release
        # Attempts to acquire it, as steps of an iterator: between a call and the storing of its
        # result Python may run a handler of a signal, which may raise.
        self._turns = map(self._lock.acquire, repeat(False))
        self._next_number = itertools.count().__next__
        self._status = MPI.Status()  # guarded by the lock
        self._probes: dict[Pattern, Iterator[MPI.Message | MatchedMessage | None]] = {}
        self.is_watched = self.is_in_use = False

    def add(self, receive: Posted, waits: bool) -> None:
        """Post a receive.

        Args:
            waits: The calling thread waits for the receive next, and probes the queue meanwhile.
        """
        pattern, self.is_in_use = receive.pattern, True
        with self._lock:
            receive.number = self._next_number()
            same = self._posted.get(pattern)
            if same is None:
                self._posted[pattern] = deque((receive,))
            else:
                same.append(receive)
            if pattern[0] < 0:
                self._has_any_source = True
        # No probe here, which would cost as much as all else: the thread that waits probes, and
        # the poller within milliseconds.
        if not waits and not self.is_watched:
            receive_poller.watch(self)

    def match(self, receive: Posted | None = None) -> bool:
        """Start the receives whose messages have arrived; return whether any was started.

        Args:
            receive: If given, its thread waits, and only messages of its source and tag are probed
                for, unless many receives are posted.
        """
        if not self._posted:
            return False
        for has_turn in self._turns:
            if has_turn:
                break
            return False
        try:
            count = len(self._posted)
            if receive is None:
                return self._match_all(count)
            self.is_in_use = True
            if count > _MANY_PATTERNS and self._match_arrived():
                return True
            return self._match(receive.pattern, _PROBES if count == 1 else 1)
        finally:
            self._leave()

    def withdraw(self, receive: Posted) -> None:
        """Remove a receive that no message has matched."""
        with self._lock:
            if receive.number >= 0 or not receive.is_started():
                receive.error = GroupError("the receive was withdrawn")
            if receive.number >= 0:
                receive.number = -1
                self._trim(receive.pattern, self._posted[receive.pattern])

    def close(self) -> None:
        """Withdraw all receives; the communicator may be freed afterwards."""
        with self._lock:
            for pattern in list(self._posted):
                self._fail(pattern, GroupError("the group was closed while a receive was posted"))
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

    def _match_all(self, count: int) -> bool:
        if count > _FEW_PATTERNS:
            has_matched = self._match_arrived()
            if has_matched is not None:
                return has_matched
        # Not any(), which would stop at the first: each is probed for.
        return sum([self._match(pattern) for pattern in list(self._posted)]) > 0

    def _match_arrived(self) -> bool | None:
        """Start the receives of messages in the order of their arrival.

        Returns:
            Whether any was started; None if the first message that has arrived is for none of them
            or MPI refuses the question, and each pattern must be probed for.
        """
        posted, status, has_matched = self._posted, MPI.Status(), False
        try:
            while posted and self._mpi.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
                source, tag = status.Get_source(), status.Get_tag()
                pattern = (source, tag)
                if pattern not in posted:
                    pattern = (MPI.ANY_SOURCE, tag)
                if pattern not in posted or not self._match(pattern):
                    return has_matched or None
                has_matched = True
        except MPI.Exception:  # a rank has died: the probe of its pattern raises, and is recorded
            return has_matched or None
        return has_matched

    def _match(self, pattern: Pattern, probes: int = 1) -> bool:
        """Start the receives of the messages that have arrived of one source and tag.

        Args:
            probes: Number of probes for the first message. Several in one call save the cost of the
                call where a thread waits for the only receive.
        """
        (source, tag), posted, status = pattern, self._posted, self._status
        has_matched, probing = False, self._probes.get(pattern)
        if probing is None:
            probing = self._probing(pattern)
        while pattern in posted:
            message = receive = None
            try:
                for message in probing:
                    if message is not None or probes <= 1:
                        break
                    probes -= 1
                if message is None:
                    break
                sender, taken, same = source, pattern, posted[pattern]
                if self._has_any_source:
                    sender = status.Get_source()
                    taken, same = self._first(sender, tag)
                receive = same[0]
                receive.start(message, sender, status.Get_count(MPI.BYTE))
                # Up to the trim without a call, and so without a handler of a signal.
                receive.number = -1
                del same[0]
                if not same:
                    del posted[taken]
                elif same[0].number < 0:
                    self._trim(taken, same)
            except MPI.Exception as error:
                self._fail(pattern, error)
                break
            except BaseException:
                # Of a handler of a signal, which may run behind each call.
                if message is not None:
                    self._end_left(message, receive, pattern, status)
                raise
            has_matched, probes = True, 1
        return has_matched

    def _end_left(
        self,
        message: MPI.Message | MatchedMessage,
        receive: Posted | None,
        pattern: Pattern,
        status: MPI.Status,
    ) -> None:
        """Start the receive of a matched message that an exception has left."""
        sender = status.Get_source()
        if receive is None:
            taken, same = self._first(sender, pattern[1])
            receive = same[0]
        else:
            taken = receive.pattern
        if not receive.is_started():
            receive.start(message, sender, status.Get_count(MPI.BYTE))
        if receive.number >= 0:
            receive.number = -1
            self._trim(taken, self._posted[taken])

    def _probing(self, pattern: Pattern) -> Iterator[MPI.Message | MatchedMessage | None]:
        """Return an iterator of matched probes for a source and tag, which fill the status.

        Between a call and the storing of its result Python may run a handler of a signal, which may
        raise; not between the step of an iterator and that.
        """
        if len(self._probes) >= _KEPT:
            self._probes.clear()
        source, tag = pattern
        probing = map(self._mpi.Improbe, repeat(source), repeat(tag), repeat(self._status))
        self._probes[pattern] = probing
        return probing

    def _first(self, source: int, tag: int) -> tuple[Pattern, deque[Posted]]:
        """Return where the receive is that was posted first of those that accept a message."""
        exact, any_source = (source, tag), (MPI.ANY_SOURCE, tag)
        candidates = ((one, self._posted.get(one)) for one in (exact, any_source))
        return min(
            ((one, same) for one, same in candidates if same), key=lambda found: found[1][0].number
        )

    def _trim(self, pattern: Pattern, same: deque[Posted]) -> None:
        """Drop the withdrawn receives from both ends."""
        while same and same[0].number < 0:
            same.popleft()
        while same and same[-1].number < 0:
            same.pop()
        if not same:
            del self._posted[pattern]

    def _fail(self, pattern: Pattern, error: Exception) -> None:
        for receive in self._posted.pop(pattern):
            if receive.number >= 0:
                receive.number, receive.error = -1, error
