"""Messages between a group's windows: signals, and puts into memory that the sender cannot map.

All windows of a group share one communicator. A put is a header and its data, which the receiver
has MPI write into place, and an answer. A signal to a rank whose memory the sender maps is a
message of 8 bytes, for which the receiver keeps a receive posted. Any other signal is a header
behind those of the puts, and counts when the data in front of it have arrived. Headers are received
by the thread that waits for one, and by ``receive_poller`` while a window is open that other ranks
write to by messages.

Source: MPI-4.1 §3.5 (order of messages), §3.8.2 (matched probe). Decision 0022.
"""

from __future__ import annotations

import logging
import struct
import threading
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

from mpidist.comm.algorithms import node_memory
from mpidist.comm.execution.execution import Execution
from mpidist.comm.execution.operation import Operation, Tensors
from mpidist.comm.memory import buffer
from mpidist.comm.mpi import closed_communicators, mpi_errors
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import Mpi, MpiCalls, Request
from mpidist.errors import FrameError, MpidistError

_log = logging.getLogger(__name__)

PUT, SIGNAL, DONE, REFUSED = range(4)
_FIXED = struct.Struct("<4q")
HEADER_BYTES = _FIXED.size
# Of the windows' own communicator, where nothing else is sent.
_HEADER, _DATA, _SIGNAL, _END = 1, 2, 3, 4
_NUMBER_BYTES = 8


class Header(NamedTuple):
    """Fixed part of every message.

    Attributes:
        kind: PUT, SIGNAL, DONE (the answer to the oldest put without one), or REFUSED (the same).
        number: The registration's number, the same on all ranks.
        offset: First byte of a put in the window, else 0.
        nbytes: Length of a put, > 0, else 0.
    """

    kind: int
    number: int
    offset: int = 0
    nbytes: int = 0


def encoded(header: Header) -> bytes:
    """Return the bytes of a header."""
    return _FIXED.pack(*header)


def decoded(data: bytes | bytearray) -> Header:
    """Return the header of a message.

    Raises:
        FrameError: The bytes are none.
    """
    if len(data) != HEADER_BYTES:
        raise FrameError(f"a window's message of {len(data)} bytes")
    header = Header(*_FIXED.unpack(data))
    is_whole = header.nbytes > 0 or header.kind != PUT
    if not PUT <= header.kind <= REFUSED or min(header) < 0 or not is_whole:
        raise FrameError(f"a window's message with {header}")
    return header


class Put:
    """A put by messages, with the interface of an MPI request.

    Attributes:
        window: This rank's part of the window.
        where: The beginning of a message about it.
        dst: The receiver's rank.
        answer: DONE or REFUSED, None before.
    """

    __slots__ = ("_channel", "answer", "dst", "requests", "where", "window")

    def __init__(self, channel: WindowChannel, window: Exposed, where: str, dst: int) -> None:
        self._channel = channel
        self.window = window
        self.where = where
        self.dst = dst
        self.requests: list[Any] = []
        self.answer: int | None = None

    def Test(self, status: MPI.Status | None = None) -> bool:
        """See MPI_Test; true when the data are in the receiver's memory."""
        while self.requests and self.requests[-1].Test():
            self.requests.pop()
        return self.is_answered() and not self.requests

    def is_answered(self) -> bool:
        """Return whether the receiver has answered.

        Raises:
            MpidistError: It has refused.
        """
        self._channel.match()
        if self.answer == REFUSED:
            self.window.puts.discard(self)
            raise MpidistError(
                f"{self.where}: rank {self.dst} has no memory there: it has deregistered its tensor"
            )
        return self.answer is not None


class AnswerWait:
    """A wait for the answer to a put, which the put's own thread may wait for at the same time."""

    __slots__ = ("_put",)

    def __init__(self, put: Put) -> None:
        self._put = put

    def Test(self, status: MPI.Status | None = None) -> bool:
        """See MPI_Test."""
        return self._put.is_answered()


class SignalWait:
    """A wait for one signal, with the interface of an MPI request."""

    __slots__ = ("_channel", "_source", "_window")

    def __init__(self, channel: WindowChannel, window: Exposed, source: int) -> None:
        self._channel = channel
        self._window = window
        self._source = source

    def Test(self, status: MPI.Status | None = None) -> bool:
        """See MPI_Test; takes the signal that has arrived."""
        return self._channel.take(self._window, self._source)


@dataclass
class Exposed:
    """This rank's part of a registered window.

    Attributes:
        number: The registration's number, the same on all ranks.
        tensor: The memory that other ranks write to.
        maps: By rank, whether this rank maps that one's memory. Its own counts as mapped.
        mapped_by: By rank, whether that rank maps this one's memory.
        signals: By source, the signals that have arrived and were not waited for.
        arrived: By source, the number of signals that have arrived.
        sent: By destination, the number of signals that this rank has sent.
        puts: This rank's puts by messages that have no answer yet.
        sends: By destination, a persistent send of a signal.
        is_idle: By destination, whether the last such send is known to have ended.
    """

    number: int
    tensor: torch.Tensor
    maps: Sequence[bool]
    mapped_by: Sequence[bool]
    signals: list[deque[None]] = field(init=False)
    arrived: list[int] = field(init=False)
    sent: list[int] = field(init=False)
    puts: set[Put] = field(default_factory=set)
    sends: dict[int, MPI.Prequest] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = len(self.maps)
        self.signals = [deque() for _ in range(size)]
        self.arrived, self.sent = [0] * size, [0] * size
        self.is_idle = [True] * size
        self.number_bytes = self.number.to_bytes(_NUMBER_BYTES, "little")


@dataclass
class _Arrival:
    """Data under way to this rank.

    Attributes:
        requests: MPI's receives that have not ended.
        memory: Their memory, as long as MPI writes there.
        number: The registration's number.
        answer: DONE, or REFUSED if the data go nowhere.
    """

    requests: list[Request]
    memory: object
    number: int
    answer: int


# A registration's number: a signal behind data.
_Entry: TypeAlias = "_Arrival | int"


class WindowChannel:
    """The windows of one group on this rank, and their messages.

    Args:
        mpi: The windows' communicator.

    Attributes:
        is_watched: See ``receive_poller``, which sets it.
        is_in_use: False: other ranks write while this rank makes no calls.
    """

    def __init__(self, mpi: Mpi) -> None:
        self._mpi = mpi
        self.rank: int = mpi.Get_rank()
        self.size: int = mpi.Get_size()
        self.is_watched = self.is_in_use = False
        self.registrations = 0  # so far
        self._is_closed = False
        self._answers = False  # puts to windows that are gone
        self._exposed: dict[int, Exposed] = {}
        self._receiving = threading.Lock()
        # A header and its data are sent one directly after the other.
        self._sending = threading.Lock()
        self._sends: deque[tuple[Request, object]] = deque()
        # By source: data under way, and signals behind them.
        self._behind: list[deque[_Entry]] = [deque() for _ in range(self.size)]
        self._unanswered: list[deque[Put]] = [deque() for _ in range(self.size)]
        self._status = MPI.Status()  # guarded by _receiving, as is the space
        self._space = bytearray(HEADER_BYTES)
        # By source, a persistent receive of the next signal, and its memory; made at first use.
        self._posted: dict[int, tuple[MPI.Prequest, bytearray]] = {}

    def next_number(self) -> int:
        """Return the number of the next registration, the same on all ranks."""
        self.registrations += 1
        return self.registrations

    def open(self, window: Exposed) -> None:
        """Take messages for a window from now on."""
        self._exposed[window.number] = window

    def remove(self, window: Exposed, are_all_complete: bool) -> None:
        """Drop later messages for a window, and answer its puts with REFUSED.

        Args:
            are_all_complete: No rank has a put under way. Otherwise this rank goes on to answer.
        """
        self._answers = self._answers or not are_all_complete
        self._exposed.pop(window.number, None)
        while window.sends:
            window.sends.popitem()[1].Free()

    def is_empty(self) -> bool:
        """Return whether no other rank writes to this rank's memory by messages."""
        return self._is_closed or (
            not self._answers and all(all(each.mapped_by) for each in list(self._exposed.values()))
        )

    def match(self) -> bool:
        """Handle the messages that have arrived; return whether there was any."""
        if self._is_closed or not self._receiving.acquire(blocking=False):
            return False
        try:
            has_any = False
            while self._receive():
                has_any = True
            for source, entries in enumerate(self._behind):
                if entries:
                    self._advance(source, entries)
            while self._sends and mpi_errors.is_over(self._sends[0][0]):
                self._sends.popleft()
            return has_any
        finally:
            self._receiving.release()

    def signal(self, window: Exposed, dst: int) -> None:
        """Send a signal, behind this rank's puts to the same rank."""
        with self._sending:
            window.sent[dst] += 1
            if dst != self.rank:
                if window.maps[dst]:
                    self._send_signal(window, dst)
                else:
                    self._send(dst, _HEADER, encoded(Header(SIGNAL, window.number)))
                return
        with self._receiving:
            self._count(dst, window.number)

    def take(self, window: Exposed, source: int) -> bool:
        """Take a signal from a rank if one has arrived; return whether."""
        signals = window.signals[source]
        if not signals:
            if not window.mapped_by[source]:
                self.match()
            elif source != self.rank:
                self._receive_signal(source)
        # Another thread may take it first.
        try:
            signals.pop()
        except IndexError:
            return False
        return True

    def put(self, window: Exposed, where: str, dst: int, offset: int, memory: torch.Tensor) -> Put:
        """Start to send a contiguous host tensor to byte ``offset`` of rank ``dst``'s window."""
        put = Put(self, window, where, dst)
        with self._sending:
            self._send(dst, _HEADER, encoded(Header(PUT, window.number, offset, memory.nbytes)))
            window.puts.add(put)
            self._unanswered[dst].append(put)
            for start, length in buffer.pieces(memory.nbytes):
                space = buffer.byte_range(memory, start, length)
                put.requests.append(self._mpi.Isend(space, dst, _DATA))
        return put

    def drain(self) -> list[int]:
        """Drop the signals that have arrived; return by source how many were not waited for."""
        counts = [0] * self.size
        for source in range(self.size):
            for window in list(self._exposed.values()):
                while self.take(window, source):
                    counts[source] += 1
        return counts

    def close(self) -> None:
        """Give up the communicator. Collective: over the group; no rank waits for another."""
        with self._receiving:
            self._is_closed = True
            self._exposed.clear()
            for receive, _ in self._posted.values():
                receive.Cancel()
                receive.Wait()
                receive.Free()
            self._posted.clear()
            # MPI may write there until the messages have come.
            self._sends.extend(
                (request, entry.memory)
                for entries in self._behind
                for entry in entries
                if isinstance(entry, _Arrival)
                for request in entry.requests
            )
        closed_communicators.add(self._mpi, _END)

    def _send(self, dst: int, tag: int, data: bytes) -> None:
        request = self._mpi.Isend((data, len(data), MPI.BYTE), dst, tag)
        if not request.Test():
            self._sends.append((request, data))

    def _send_signal(self, window: Exposed, dst: int) -> None:
        send = window.sends.get(dst)
        if send is None:
            space = (window.number_bytes, _NUMBER_BYTES, MPI.BYTE)
            send = window.sends[dst] = self._mpi.Send_init(space, dst, _SIGNAL)
        if window.is_idle[dst] or send.Test():
            send.Start()
            # Most have ended now, and the next signal may use the request again.
            window.is_idle[dst] = send.Test()
        else:
            self._send(dst, _SIGNAL, window.number_bytes)

    def _receive_signal(self, source: int) -> None:
        if not self._receiving.acquire(blocking=False):
            return
        try:
            posted = self._posted.get(source)
            if posted is None:
                space = bytearray(_NUMBER_BYTES)
                buffer_of = (space, _NUMBER_BYTES, MPI.BYTE)
                posted = self._mpi.Recv_init(buffer_of, source, _SIGNAL), space
                self._posted[source] = posted
                posted[0].Start()
            receive, space = posted
            try:
                if receive.Test():
                    self._count(source, int.from_bytes(space, "little"))
                    receive.Start()
            except Exception:
                # After an error (ULFM) the receive is inactive, and its tests would find a signal.
                del self._posted[source]
                raise
        finally:
            self._receiving.release()

    def _receive(self) -> bool:
        message = mpi_errors.matched_probe(self._mpi, _HEADER, self._status)
        if message is None:
            return False
        source, length = self._status.Get_source(), self._status.Get_count(MPI.BYTE)
        data = self._space if length == HEADER_BYTES else bytearray(length)
        message.Recv((data, length, MPI.BYTE))
        try:
            header = decoded(data)
        except FrameError as error:
            # No message may end the thread that polls.
            _log.warning("rank %d: a message of rank %d is dropped: %s", self.rank, source, error)
        else:
            self._handle(source, header)
        return True

    def _handle(self, source: int, header: Header) -> None:
        kind, number, offset, nbytes = header
        if kind == SIGNAL:
            entries = self._behind[source]
            if entries:
                entries.append(number)
            else:
                self._count(source, number)
        elif kind == PUT:
            self._receive_data(source, number, offset, nbytes)
        elif self._unanswered[source]:
            put = self._unanswered[source].popleft()
            put.answer = kind
            # A refused put stays, for tensor_deregister to raise its error, until it is tested.
            if kind == DONE:
                put.window.puts.discard(put)

    def _receive_data(self, source: int, number: int, offset: int, nbytes: int) -> None:
        window = self._exposed.get(number)
        fits = window is not None and offset + nbytes <= window.tensor.nbytes
        memory: Any = None
        if window is not None and fits:
            memory = window.tensor
            address = memory.data_ptr() + offset
        else:
            offset, memory = 0, torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            address = memory.data_ptr()
        spans = [
            (buffer.memory(address + start, length), length, MPI.BYTE)
            for start, length in buffer.pieces(nbytes)
        ]
        requests: list[Request] = [self._mpi.Irecv(span, source, _DATA) for span in spans]
        self._behind[source].append(_Arrival(requests, memory, number, DONE if fits else REFUSED))

    def _advance(self, source: int, entries: deque[_Entry]) -> None:
        while entries:
            first = entries[0]
            if isinstance(first, int):
                self._count(source, first)
            else:
                while first.requests and mpi_errors.is_over(first.requests[-1]):
                    first.requests.pop()
                if first.requests:
                    return
                with mpi_errors.death_tolerated():
                    self._send(source, _HEADER, encoded(Header(first.answer, first.number)))
            entries.popleft()

    def _count(self, source: int, number: int) -> None:
        # A signal of an earlier registration is dropped.
        window = self._exposed.get(number)
        if window is not None:
            window.arrived[source] += 1
            window.signals[source].append(None)


class GroupChannel:
    """The ``WindowChannel`` of one group, made for its first window with a tensor.

    Args:
        execution: The group's.
    """

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._made: WindowChannel | None = None

    def get(self) -> WindowChannel:
        """Return the channel. Collective: the first call, over the group."""
        if self._made is None:
            where = self._execution.state.where("allocate")
            make = Operation("tensor_register", channel_of, args=(where,))
            self._made = self._execution.launch(make)
        return self._made

    def close(self) -> None:
        """Close the channel, if there is one; a ResourceWarning names signals without a wait.

        Collective: over the group; no rank waits for another.
        """
        if self._made is None:
            return
        with mpi_errors.death_tolerated():
            for rank, count in enumerate(self._made.drain()):
                if count:
                    warnings.warn(
                        f"{self._execution.state.where('close')}: {count} signals of rank {rank} "
                        "to a window were never waited for",
                        ResourceWarning,
                        3,
                    )
        self._made.close()


def channel_of(comm: Communicator, inputs: Tensors, outputs: Tensors, where: str) -> WindowChannel:
    """Return the messages of a group's windows, on a communicator of their own.

    Makes the group's node memory as well, so that allocations concern one rank from then on.

    Collective: over the communicator.

    Args:
        comm, inputs, outputs: As of every executor.
        where: See ``node_memory.make``.
    """
    if node_memory.has_neighbours(comm):
        node_memory.make(comm, inputs, outputs, where)
    if isinstance(comm.mpi, MpiCalls) and comm.mpi.is_abandonable:
        # A wait for a missing rank can be abandoned here, and not in MPI_Comm_dup.
        comm.mpi.Barrier()
    mpi = comm.mpi.Dup()
    mpi.Set_errhandler(MPI.ERRORS_RETURN)
    return WindowChannel(mpi)
