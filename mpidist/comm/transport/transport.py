"""Unexpected-message transport: an eager message of at most 32 KiB, then payloads of any size.

A message is a kind, three numbers, a header, and parts: memory of any number and size. The header
always travels in the eager message, for which receives are posted in advance. Parts up to 16 KiB
are packed behind the header or, where they do not fit, into one payload. Larger parts travel as
payloads of their own, without a copy; where they are more than an eager message announces, others
precede it. ``eager_message`` has the layout.

Eager messages between two ranks arrive in the order in which they were sent (MPI-4.1 §3.5).
Payloads may arrive after later eager messages, so an ``Incoming`` is returned twice: when its eager
message has arrived, and when all of its parts have. A message whose lengths do not fit is returned
with ``damage``, because its kind and sequence are still valid.

No call blocks. One thread at a time may ``poll``; any number may ``send``. All ranks may send to
all at the same time, whatever the size, because a rank that polls also receives.

A signal's handler may raise, and a handler or a finalizer may call again, between any two steps of
the main thread. So a call of MPI and the record of what it has done are one call into C: the start
of a receive, its completion, and a send. Messages are numbered, and a message is taken up by one
assignment. ``peek`` and ``take`` may be interrupted; ``poll`` belongs to threads of the library,
where no handler of a signal runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import compress, filterfalse, islice, repeat
from operator import methodcaller

from mpidist.comm.group import ProcessGroup
from mpidist.comm.memory.buffer_pool import BufferPool
from mpidist.comm.mpi import agreement_lock, mpi_errors, revocation, runtime
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.tags import Tag
from mpidist.comm.serialization.tensor_format import Part
from mpidist.comm.transport import eager_message, eager_receives, loopback
from mpidist.comm.transport.eager_message import (
    EAGER_BYTES,
    FIXED,
    FIXED_BYTES,
    HEADER_BYTES,
    unpack_parts,
)
from mpidist.comm.transport.eager_receives import Restartable
from mpidist.comm.transport.incoming import Incoming
from mpidist.comm.transport.payload_receives import PayloadReceives
from mpidist.comm.transport.sends import MAX_PENDING, Sends
from mpidist.errors import FrameError, RankFailureError

_RECEIVES = 4  # posted at a time
_start = methodcaller("Start")
_PEEKED_NOTHING, _PEEKED_OTHER = (False, None), (True, None)


class Transport:
    """Messages between the ranks of a group; a lone process (``group`` None) sends to itself.

    Nothing is received before ``open_receives``.

    Args:
        group: The transport uses its communicator, with reserved tags.

    Attributes:
        is_revoked: The communicator was revoked (ULFM): nothing is received any more.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.rank = group.rank if group is not None else 0
        self.size = group.size if group is not None else 1
        self.world_ranks = group.world_ranks if group is not None else (0,)
        self.generation = 0  # set by the user; messages of another generation are dropped
        self._memory = BufferPool()
        self._loopback: deque[Incoming] = deque()
        self._incomplete: list[Incoming] = []
        self._eager_count = 0  # eager messages received while payloads are under way
        self._posted: list[eager_receives.EagerReceive] = []
        # The number of the next eager message to take up, which completes the posted receive of
        # that index modulo their count; the number of the last message that has arrived; the
        # receive that was started last; and the error of a test.
        self._number = 0
        self._arrived: deque[int] = deque((-1,), maxlen=1)
        self._started: deque[Restartable] = deque(maxlen=1)
        self._error: Exception | None = None
        self._dead: set[int] = set()
        self._is_closed = self.is_revoked = False
        if group is not None:
            self._mpi = group._comm.plain
            self._byte = MPI.BYTE
            self._eager_tag = group._comm.own_tag(Tag.EAGER)
            self._payload_tag = group._comm.own_tag(Tag.PAYLOAD)
            self._sends = Sends(self._mpi.Isend, self._eager_tag, self._payload_tag)
            self._sending = self._sends.pending
            self._status = MPI.Status()
            self._payloads = PayloadReceives(self._mpi, self._payload_tag, self._memory)
            runtime.close_at_exit(self, stage=1)  # after the threads that poll

    def open_receives(self) -> None:
        """Post the receives, if they are not posted yet.

        Local: not collective, and no thread may poll meanwhile. Blocks: no.
        """
        if self.group is not None and not self._posted:
            self._posted = eager_receives.post_receives(self._mpi, self._eager_tag, _RECEIVES)
            self._number = 0
            self._arrived.append(-1)
            self._started.append(self._posted[-1][0])

    def send(
        self,
        to: int,
        kind: int,
        sequence: int = 0,
        context: int = 0,
        flags: int = 0,
        header: bytes | bytearray = b"",
        parts: Sequence[Part] = (),
        devices: Sequence[int | None] = (),
    ) -> None:
        """Send a message; memory of ``parts`` must not change until the receiver has answered.

        Args:
            to: The receiver's rank; may be the caller's own.
            kind: Defined by the user, below 256, as are ``flags``.
            sequence: Defined by the user, below 2⁶⁴, as is ``context``.
            header: At most ``HEADER_BYTES`` with parts; without parts, up to the size of an eager
                message.
            parts: Contiguous tensors or buffers, of any number and size.
            devices: For each part, the index of the receiver's device for it; None for host memory.

        Blocks: no; for parts on a device, until the work that produces them has completed.

        Raises:
            ValueError: The header is too large; nothing is sent.
        """
        if parts:
            self._send_with_parts((to, kind, sequence, context, flags), header, parts, devices)
            return
        message = (
            FIXED.pack(kind, flags, 0, self.generation, sequence, context, len(header), 0) + header
        )
        if len(message) > EAGER_BYTES:
            raise ValueError(
                f"a header of {len(header)} bytes; at most {EAGER_BYTES - FIXED_BYTES} travel in "
                "one message"
            )
        if to == self.rank:
            data = bytearray(message)
            self._loopback.append(
                Incoming(to, kind, flags, sequence, context, data, FIXED_BYTES, len(data))
            )
        else:
            self._sends.start_one(to, message)
            if len(self._sending) >= self._sends.test_at:
                self._sends.reclaim()

    def _send_with_parts(
        self,
        numbers: tuple[int, ...],
        header: bytes | bytearray,
        parts: Sequence[Part],
        devices: Sequence[int | None],
    ) -> None:
        if len(header) > HEADER_BYTES:
            raise ValueError(
                f"a header of {len(header)} bytes; at most {HEADER_BYTES} travel before parts"
            )
        to, kind, sequence, context, flags = numbers
        if to == self.rank:
            own = bytearray(header)
            incoming = Incoming(to, kind, flags, sequence, context, own, 0, len(own))
            loopback.add_copies(incoming, parts, devices, self._memory)
            self._loopback.append(incoming)
            return
        messages, payloads = eager_message.encode(
            (kind, flags, self.generation, sequence, context), header, parts, devices
        )
        self._sends.start(to, messages, payloads)

    def poll(self, tests: int = 1) -> Incoming | None:
        """Test up to ``tests`` times for a message or the last part of one; None: there is none.

        Raises:
            FrameError: Bytes that are no message. They are dropped, and the next call continues.
            RankFailureError: MPI reports failed ranks (ULFM); ``ranks`` are new ones in the group.
        """
        if self._loopback or not self._posted:
            return self._loopback.popleft() if self._loopback else None
        if self._incomplete and self._eager_count:
            # One test after each message: a sender whose next message is always ready must not
            # delay the payloads of other senders.
            place = self._eager_count % len(self._incomplete)
            if (complete := self._finish(place)) is not None:
                return complete
        if not self._has_arrived(tests):
            return self._progress() if self._sending or self._incomplete else None
        # Receives complete in the order of posting, which is the order of each sender's messages.
        request, space, _ = self._posted[self._number % _RECEIVES]
        if self._error is not None:
            error, self._error = self._error, None
            raise self._translated(error, request) from error
        status = self._status
        self._number += 1
        if self._incomplete:
            self._eager_count += 1
        data = space[: status.Get_count(self._byte)]
        # A rank that always has a message to return tests its sends here.
        if len(self._sending) > MAX_PENDING:
            self._sends.test()
        source, nbytes = status.Get_source(), len(data)
        if source < 0:
            return None  # ULFM has completed the receive without a message: a rank has died
        if nbytes < FIXED_BYTES:
            raise FrameError(f"truncated message of {nbytes} bytes from rank {source}")
        fields = FIXED.unpack_from(data)
        kind, flags, payloads, generation, sequence, context, header, packed = fields
        if payloads or packed or generation != self.generation or nbytes != FIXED_BYTES + header:
            return self._accept(source, data, fields)
        return Incoming(source, kind, flags, sequence, context, data, FIXED_BYTES, nbytes)

    def peek(self, tests: int = 1) -> tuple[bool, Incoming | None]:
        """Test up to ``tests`` times for a message, and leave it to ``take`` or ``poll``.

        Returns:
            Whether there is something for ``poll``; and the next message if ``take`` may take it
            up: one that has no payloads, and that nothing precedes.
        """
        if self._loopback or self._incomplete:
            return _PEEKED_OTHER
        if not self._posted or not self._has_arrived(tests):
            if self._sending:
                self._sends.test()
            return _PEEKED_NOTHING
        number, status = self._number, self._status
        if self._error is not None or self._arrived[0] != number:
            return _PEEKED_OTHER
        data = self._posted[number % _RECEIVES][1][: status.Get_count(self._byte)]
        nbytes = len(data)
        if nbytes < FIXED_BYTES:
            return _PEEKED_OTHER
        fields = FIXED.unpack_from(data)
        kind, flags, payloads, generation, sequence, context, header, packed = fields
        if payloads or generation != self.generation or nbytes != FIXED_BYTES + header + packed:
            return _PEEKED_OTHER
        if packed:
            incoming, _ = eager_message.decode(status.Get_source(), data, fields)
            unpack_parts(incoming)
            if incoming.damage is not None:
                return _PEEKED_OTHER
        else:
            incoming = Incoming(
                status.Get_source(), kind, flags, sequence, context, data, FIXED_BYTES, nbytes
            )
        incoming.number = number
        return True, incoming

    def take(self, incoming: Incoming) -> None:
        """Take up the message that ``peek`` has returned, if it is still there."""
        number = incoming.number
        if self._number == number:
            self._number = number + 1

    def _has_arrived(self, tests: int) -> bool:
        """Test for the next eager message; whether it, or an error of the test, is there."""
        number, posted, arrived = self._number, self._posted, self._arrived
        if arrived[0] == number or self._error is not None:
            return True
        # The receive is posted again only now, because every MPI call releases the GIL: getting it
        # back from a main thread that computes takes half a millisecond.
        consumed = posted[(number - 1) % _RECEIVES][0]
        if self._started[0] is not consumed:
            start = filterfalse(_start, (consumed,))
            # Asked again: a call of a signal's handler may have come in between. It cannot between
            # a comparison and the call behind it.
            if self._number == number and self._started[0] is not consumed:
                self._started.extend(start)
        test = posted[number % _RECEIVES][2]
        found = islice(compress(repeat(number), map(test, repeat(self._status, tests))), 1)
        try:
            if self._number == number and arrived[0] != number:
                arrived.extend(found)
        except Exception as error:
            if not mpi_errors.is_mpi_error(error):
                raise
            self._error = error
            return True
        return arrived[0] == self._number

    def close(self, timeout_s: float) -> None:
        """Withdraw the receives, so that MPI can finalize; a second call has no effect."""
        if self._is_closed:
            return
        self._is_closed = True
        receives, self._posted = self._posted, []
        first = self._number % _RECEIVES
        in_order = receives[first:] + receives[:first]
        if in_order:
            last = in_order[-1][0]
            idle = None if self._started[0] is last else last
            eager_receives.withdraw(self._mpi, self._eager_tag, in_order, idle, timeout_s)

    def take_turns(self) -> None:
        """Hold the lock of agreements in each send from now on; see ``agreement_lock``."""
        if self.group is not None:
            self._sends.isend = agreement_lock.holding(self._sends.isend)

    def _accept(self, source: int, data: bytearray, fields: tuple[int, ...]) -> Incoming | None:
        generation = fields[3]
        incoming, n_payloads = eager_message.decode(source, data, fields)
        if incoming.damage is not None:
            if generation != self.generation:
                raise incoming.damage  # no call of this generation
            if n_payloads:
                self._payloads.refuse(source, str(incoming.damage))
            if incoming.is_continued:
                raise incoming.damage  # the last eager message has the call
        elif n_payloads:
            self._payloads.begin(incoming, n_payloads, FIXED_BYTES)
        if incoming.is_continued:
            return None
        if generation != self.generation:
            # Its payloads must be received, because those of the next message follow them.
            incoming.is_new = False
            incoming.kind = 0
        if incoming.damage is not None and not incoming.receives:
            return incoming if incoming.kind else None
        if incoming.receives:
            self._incomplete.append(incoming)
        elif incoming.section is not None:
            unpack_parts(incoming)
        return incoming if incoming.kind else None

    def _progress(self) -> Incoming | None:
        self._eager_count = 0
        if self._sending:
            self._sends.test()
        for place in range(len(self._incomplete)):
            incoming = self._finish(place)
            if incoming is not None or place >= len(self._incomplete):
                return incoming
        return None

    def _finish(self, place: int) -> Incoming | None:
        """Return an incomplete message if its last payload has arrived, else None."""
        incoming = self._incomplete[place]
        try:
            if not self._payloads.have_arrived(incoming):
                return None
        except Exception as error:
            del self._incomplete[place]
            raise self._translated(error, None) from error
        del self._incomplete[place]
        if not incoming.kind:
            return None
        if incoming.section is not None:
            unpack_parts(incoming)
        return incoming

    def _translated(self, error: Exception, request: Restartable | None) -> Exception:
        """Return the library's error for an error of MPI, and keep the receives posted."""
        if not mpi_errors.is_mpi_error(error):
            return error
        if revocation.is_revoked(self._mpi):
            # No message comes or goes any more.
            self._posted, self.is_revoked = [], True
            others = [rank for rank in range(self.size) if rank != self.rank]
            return RankFailureError("the group of the workers was revoked", others)
        if request is not None and not mpi_errors.is_pending(error):
            self._number += 1
        if not mpi_errors.is_failure(error):
            return FrameError(f"a message of rank {self._status.Get_source()} was refused: {error}")
        dead = mpi_errors.acknowledged_deaths(self._mpi)
        news = sorted(dead - self._dead)
        self._dead |= dead
        return RankFailureError("MPI reports a rank as dead", news)
