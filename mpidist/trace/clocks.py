"""Clocks of the ranks: offsets to rank 0's clock by round trips, and times on rank 0's clock.

A round trip of messages between rank 0 and another rank has the other's time between two times of
rank 0. The other clock's offset is then known to half of the round trip, whatever part of it each
direction took; so the shortest of 50 round trips is used. Two such offsets, at the begin and at the
end of a recording, give the drift of the clock between them. Processes under one kernel and in one
time namespace read one monotonic clock (time_namespaces(7)): their offset is zero, and exact.

Source: Cristian, "Probabilistic clock synchronization", 1989; Hunold and Carpen-Amarie,
"Hierarchical clock synchronization in MPI", 2018.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mpidist.comm.mpi import backoff
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import Mpi

ROUNDS = 50
# Quartz clocks differ by up to 1e-4; what is far beyond is a clock that was set or stopped.
_MOST_DRIFT = 1e-3
_TIME = struct.Struct("<q")
# An offset, and the name of rank 0's clock.
_RESULT = struct.Struct("<qqq8s")
_PROC = Path("/proc")
_SLEEP_S = 1e-3


class RoundTrip(NamedTuple):
    """One round trip: sent and received on rank 0's clock, answered on the other's, in ns."""

    sent_ns: int
    answered_ns: int
    received_ns: int


class Offset(NamedTuple):
    """An offset at one moment.

    Attributes:
        at_ns: The moment on the rank's own clock.
        offset_ns: What is added to the own clock for rank 0's.
        error_ns: Bound of the offset's error.
    """

    at_ns: int
    offset_ns: int
    error_ns: int


def offset_of(round_trips: Iterable[RoundTrip]) -> Offset:
    """Return the offset by the shortest of the round trips."""
    sent, answered, received = min(round_trips, key=lambda trip: trip.received_ns - trip.sent_ns)
    return Offset(answered, (sent + received) // 2 - answered, (received - sent + 1) // 2)


def clock_name() -> bytes:
    """Return eight bytes that processes with one monotonic clock share; none if unknown."""
    try:
        boot = (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text(encoding="utf-8")
        namespace = os.readlink(_PROC / "self" / "ns" / "time")
    except OSError:
        return b""
    return hashlib.blake2b((boot + namespace).encode(), digest_size=8).digest()


def settled(measured: Offset, is_one_clock: bool) -> Offset:
    """Return an offset of zero for two processes with one clock, else the measured one (pure).

    Machines that were copied while they ran may have one name, and not one clock.
    """
    if is_one_clock and abs(measured.offset_ns) <= measured.error_ns:
        return Offset(measured.at_ns, 0, 0)
    return measured


@dataclass(frozen=True)
class Clock:
    """Clock of a rank between two offsets.

    Attributes:
        first: At the begin.
        last: At the end.
    """

    first: Offset
    last: Offset

    @property
    def has_jumped(self) -> bool:
        """Return whether the clock has moved between the offsets as no drift moves it."""
        bound = self.first.error_ns + self.last.error_ns
        seconds = abs(self.last.at_ns - self.first.at_ns)
        return self._moved > bound + _MOST_DRIFT * seconds or self.last.at_ns < self.first.at_ns

    @property
    def error_ns(self) -> int:
        """Return the bound of the error of a time; after a jump the jump itself."""
        error = max(self.first.error_ns, self.last.error_ns)
        return error + self._moved if self.has_jumped else error

    @property
    def _moved(self) -> int:
        return abs(self.last.offset_ns - self.first.offset_ns)

    def common(self) -> Callable[[int], int]:
        """Return a function from a time of this clock to rank 0's, in ns; the drift is removed.

        When the clock jumped between the offsets is not known: its times then have the first one.
        """
        start, offset = self.first.at_ns, self.first.offset_ns
        length = self.last.at_ns - start
        drift = self.last.offset_ns - offset
        if self.has_jumped or not length or not drift:
            return lambda time_ns: time_ns + offset
        slope = drift / length
        return lambda time_ns: time_ns + offset + int((time_ns - start) * slope)


def measured(mpi: Mpi, tag: int, rounds: int = ROUNDS) -> Offset:
    """Return the offset of this rank's ``time.monotonic_ns`` to rank 0's.

    Collective: over the communicator. Blocks: until rank 0 has measured this rank, which it does
    one by one; a rank sleeps until its turn.

    Args:
        mpi: The communicator.
        tag: A tag that nothing else uses.
        rounds: Number of round trips.
    """
    if mpi.Get_rank() == 0:
        for rank in range(1, mpi.Get_size()):
            _measure(mpi, rank, tag, rounds)
        return Offset(time.monotonic_ns(), 0, 0)
    begun = bytearray(_TIME.size)
    request = mpi.Irecv((begun, len(begun), MPI.BYTE), 0, tag)
    backoff.until(request.Test, sleep_s=_SLEEP_S)
    answer = bytearray(_TIME.size)
    for _ in range(rounds):
        mpi.Send((_TIME.pack(time.monotonic_ns()), _TIME.size, MPI.BYTE), 0, tag)
        mpi.Recv((answer, len(answer), MPI.BYTE), 0, tag)
    result = bytearray(_RESULT.size)
    mpi.Recv((result, len(result), MPI.BYTE), 0, tag)
    *offset, name = _RESULT.unpack(result)
    own = clock_name()
    # A name that is not known is packed as zeros.
    return settled(Offset(*offset), bool(own) and name == own)


def _measure(mpi: Mpi, rank: int, tag: int, rounds: int) -> None:
    trips, answer = [], bytearray(_TIME.size)
    for number in range(rounds):
        sent = time.monotonic_ns()
        mpi.Send((bytes(_TIME.size), _TIME.size, MPI.BYTE), rank, tag)
        mpi.Recv((answer, len(answer), MPI.BYTE), rank, tag)
        received = time.monotonic_ns()
        # The first one ends the rank's sleep.
        if number or rounds == 1:
            trips.append(RoundTrip(sent, _TIME.unpack(answer)[0], received))
    mpi.Send((bytes(_TIME.size), _TIME.size, MPI.BYTE), rank, tag)
    result = _RESULT.pack(*offset_of(trips), clock_name())
    mpi.Send((result, len(result), MPI.BYTE), rank, tag)
