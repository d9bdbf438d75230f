"""Barrier with timeout and failure checks, before MPI makes or splits a communicator.

MPI makes communicators by calls that block until the last member has called them, with no way to
give up. So the members synchronize by messages first: each sends a token to the first member, which
answers all of them when the last token has arrived. Until then every member polls, and stops with
an error when a member has exited or died or when the time is over. W members send 2·(W - 1)
messages of 16 bytes.

A member that gives up takes its token back, by a message, and the number of the wait is that of its
next one: members whose calls fail at different times meet as soon as all of them wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import itertools
import threading
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import cast

from mpidist.comm.mpi import (
    agreement_lock,
    backoff,
    exited_ranks,
    mpi_errors,
    rank_ranges,
    runtime,
)
from mpidist.comm.mpi.library import MPI, has_ulfm
from mpidist.comm.mpi.nonblocking import Mpi
from mpidist.errors import CommTimeout, RankFailureError

_TOKEN_BYTES = 16  # the first one says whether it is sent or taken back
_SENT, _TAKEN_BACK = b"\0", b"\1"
_SPIN_S = 500e-6
_CHECK_S = 20e-3  # between two checks for exited and dead members
_LEAST_START_S = 60.0
_HIGHEST_CREATE_TAG = 32_000  # MPI guarantees tags up to 32767
_WORLD_TAG = 1  # on the world's own communicator, where nothing else is sent

_lock = threading.Lock()
_shrinking = threading.Lock()
_world_barrier: CreationBarrier | None = None


def _forget() -> None:
    global _world_barrier
    _world_barrier = None


runtime.belongs_to_world(_forget)


class _Numbers:
    """Numbers of the waits of one subject; those of failed ones are given again."""

    def __init__(self) -> None:
        self._new = itertools.count(1)
        self._returned: list[int] = []

    def take(self) -> int:
        return heapq.heappop(self._returned) if self._returned else next(self._new)

    def give_back(self, number: int) -> None:
        heapq.heappush(self._returned, number)


class CreationBarrier:
    """Barriers over members of one communicator; any number of threads may wait in one at a time.

    Args:
        mpi: The communicator; only this object sends and receives messages of ``tag`` on it.
        tag: The tag of the tokens.
        world_ranks: World rank of each rank of the communicator.
    """

    def __init__(self, mpi: Mpi, tag: int, world_ranks: Sequence[int]) -> None:
        self._mpi = mpi
        self._tag = tag
        self._rank: int = mpi.Get_rank()
        self._world_ranks = world_ranks
        self._receiving = threading.Lock()
        self._received: Counter[tuple[int, bytes]] = Counter()  # by sender and token
        self._numbering = threading.Lock()
        self._numbers: defaultdict[bytes, _Numbers] = defaultdict(_Numbers)

    def wait(
        self,
        where: str,
        subject: str,
        members: Sequence[int],
        check: Callable[[Sequence[int]], None],
    ) -> int:
        """Block until all members have called this method equally often, failed calls not counted.

        Collective: over ``members`` (ranks of the communicator), with the same list and subject.

        Args:
            where: Rank, group and operation, for the error.
            subject: Distinguishes barriers of the same members that run at one time.
            check: Called some 50 times a second with the world ranks whose arrival is unknown;
                raises to end the wait.

        Returns:
            The number of the wait, the same on all members.

        Raises:
            RankFailureError: A member's program ended more than 2 s ago, or it is dead (ULFM).
            BaseException: The error that ``check`` raised.
        """
        others = [member for member in members if member != self._rank]
        with self._numbering:
            numbers = self._numbers[_token(subject, members)]
            number = numbers.take()
        try:
            token = _token(f"{subject} {number}", members)
            if self._rank == members[0]:
                if others:
                    self._receive_from(where, others, token, check)
                for member in others:
                    self._send(member, token)
            else:
                self._ask(where, members[0], token, check, others)
        except BaseException:
            with self._numbering:
                numbers.give_back(number)
            raise
        return number

    def _ask(
        self,
        where: str,
        first: int,
        token: bytes,
        check: Callable[[Sequence[int]], None],
        others: Sequence[int],
    ) -> None:
        self._send(first, token)
        try:
            self._receive_from(where, [first], token, check, others)
        except BaseException:
            # Or the first member, when it comes, would enter MPI's call for one that is not there.
            self._send(first, token, _TAKEN_BACK)
            raise

    def agree(self, where: str, subject: str, members: Sequence[int], vote: bool) -> bool:
        """Return whether all members vote for something.

        Collective: over ``members`` (ranks of the communicator), behind a ``wait`` of them. The
        first one waits for the votes and answers.

        Raises:
            RankFailureError: As of ``wait``.
        """
        others = [member for member in members if member != self._rank]
        against, for_it = (_token(f"{subject}: {word}", members) for word in ("no", "yes"))

        def no_more_checks(_: Sequence[int]) -> None: ...

        if self._rank == members[0]:
            self._receive_from(where, others, for_it, no_more_checks, other=against)
            vote = not self._take(others, against) and vote
            for member in others:
                self._send(member, for_it if vote else against)
            return vote
        self._send(members[0], for_it if vote else against)
        self._receive_from(where, members[:1], for_it, no_more_checks, others, other=against)
        return not self._take(members[:1], against)

    def _receive_from(
        self,
        where: str,
        senders: Sequence[int],
        token: bytes,
        check: Callable[[Sequence[int]], None],
        needed: Sequence[int] = (),
        other: bytes | None = None,
    ) -> None:
        """Wait for a token of each sender, and take it; an ``other`` one ends the wait, too."""
        tokens = (token,) if other is None else (token, other)
        checked = time.monotonic()

        def missing() -> list[int]:
            got = self._received
            return [one for one in senders if not any(got[one, each] > 0 for each in tokens)]

        def are_received() -> bool:
            while self._receive():
                pass
            return not missing()

        def check_members() -> None:
            nonlocal checked
            if time.monotonic() - checked > _CHECK_S:
                checked = time.monotonic()
                absent = [self._world_ranks[member] for member in needed or missing()]
                self._raise_for_failed(where, absent)
                check(absent)

        backoff.until(are_received, check_members, spin_s=_SPIN_S, yield_s=_SPIN_S)
        self._take(senders, token)

    def _take(self, senders: Sequence[int], token: bytes) -> list[int]:
        """Take a received token of each sender; return those that had sent it."""
        with self._receiving:
            found = [sender for sender in senders if self._received[sender, token] > 0]
            for sender in senders:
                self._received[sender, token] -= sender in found
                if not self._received[sender, token]:
                    del self._received[sender, token]
        return found

    def _raise_for_failed(self, where: str, world_ranks: Sequence[int]) -> None:
        exited = exited_ranks.ended(world_ranks)
        if exited:
            raise exited_ranks.failure(where, exited)
        dead = set(mpi_errors.known_dead(self._mpi, self._world_ranks) or ()) & set(world_ranks)
        if dead:
            names = rank_ranges.numbers(dead)
            raise RankFailureError(
                f"{where} waits for world ranks that failed: {names}", sorted(dead)
            )

    def _receive(self) -> bool:
        with self._receiving:
            status = MPI.Status()
            message = mpi_errors.matched_probe(self._mpi, self._tag, status)
            if message is None:
                return False
            data = bytearray(_TOKEN_BYTES)
            source = status.Get_source()
            message.Recv((data, _TOKEN_BYTES, MPI.BYTE))
            kind, token = bytes(data[:1]), bytes(data[1:])
            self._received[source, token] += 1 if kind == _SENT else -1
            return True

    def _send(self, dest: int, token: bytes, kind: bytes = _SENT) -> None:
        with mpi_errors.death_tolerated():
            self._mpi.Send((kind + token, _TOKEN_BYTES, MPI.BYTE), dest, self._tag)


def _token(subject: str, members: Sequence[int]) -> bytes:
    named = repr((subject, list(members))).encode()
    return hashlib.blake2b(named, digest_size=_TOKEN_BYTES - 1).digest()


def start_limit(timeout_s: float | None) -> float | None:
    """Return the timeout of a job's start: at least 60 s, because processes start unevenly."""
    return None if timeout_s is None else max(timeout_s, _LEAST_START_S)


def create_surviving_group(members: Sequence[int], identity: str) -> Mpi:
    """Return a communicator of some ranks of the job, of which others may be dead.

    MPI_Comm_create_group fails in Open MPI as soon as any rank of its communicator is dead (seen on
    5.0), MPI_Comm_create_from_group does not (MPI-4.1 §7.4.2). It takes milliseconds, so it is used
    where a rank can die and the job goes on, with ULFM. But it is a collective of the launcher, in
    which all members have hung where the launcher heard of the death meanwhile (once in some
    hundred deaths under load). So where all others are dead, which the members agree on, it is
    MPI_Comm_shrink, a collective of the ranks alone.

    Collective: over ``members``, world ranks in the new communicator's order, after a barrier of
    them.

    Args:
        members: World ranks, this one among them.
        identity: Separates two communicators that are created at the same time.
    """
    comm = runtime.world().comm
    if not has_ulfm():
        return create_group(comm, members, identity.encode())
    if (shrunk := _shrunk(members, identity)) is not None:
        alive = ranks_in(shrunk, comm)
        if gone := sorted(set(members) - set(alive)):
            shrunk.Free()
            raise RankFailureError(
                f"world ranks that failed while a group of them was made: "
                f"{rank_ranges.numbers(gone)}",
                gone,
            )
        ordered = shrunk.Split(0, members.index(runtime.world().rank))
        shrunk.Free()
        return ordered
    all_ranks = comm.Get_group()
    some = all_ranks.Incl(members)
    try:
        return MPI.Intracomm.Create_from_group(some, f"mpidist {identity}")
    finally:
        some.Free()
        all_ranks.Free()


def _shrunk(members: Sequence[int], identity: str) -> Mpi | None:
    """Return a communicator of all living ranks; None if a rank that is no member may live."""
    world = runtime.world()
    ordered = sorted(members)
    others = set(range(world.size)) - set(ordered)
    dead = mpi_errors.known_dead(world.comm, range(world.size)) or ()
    # The first member answers for one group at a time. It is the first one of any such group, so
    # that all ranks shrink in the same order, whatever threads do it.
    with _shrinking if world.rank == ordered[0] else contextlib.nullcontext():
        where = f"rank {world.rank} of {world.size}, making a group of living ranks"
        assert _world_barrier is not None
        if not _world_barrier.agree(where, identity, ordered, bool(others) and others <= set(dead)):
            return None
        with agreement_lock.lock:
            return cast("MPI.Intracomm", world.comm).Shrink()


def create_group(mpi: Mpi, members: Sequence[int], identity: bytes) -> Mpi:
    """Return a communicator of some ranks of another.

    Collective: over ``members``, in the new communicator's order, after a barrier of them.

    Args:
        mpi: The other communicator.
        members: Its ranks that become members.
        identity: Separates two communicators that two threads create at the same time.
    """
    all_ranks = mpi.Get_group()
    some = all_ranks.Incl(members)
    created = cast("MPI.Intracomm", mpi).Create_group(
        some, zlib.crc32(identity) % _HIGHEST_CREATE_TAG
    )
    some.Free()
    all_ranks.Free()
    return created


def ranks_in(mpi: Mpi, other: Mpi) -> list[int]:
    """Return the ranks that a communicator's members have in another one."""
    members, all_ranks = mpi.Get_group(), other.Get_group()
    try:
        return MPI.Group.Translate_ranks(members, None, all_ranks)
    finally:
        members.Free()
        all_ranks.Free()


def create_world_group(
    operation: str, members: Sequence[int], timeout_s: float | None, survives: bool = False
) -> tuple[Mpi, str]:
    """Wait for some ranks of the job; return a communicator of them, and its group's key.

    Collective: over ``members``, world ranks in the new communicator's order.

    Args:
        operation: As of ``wait_for_world``.
        members: World ranks, this one among them.
        timeout_s: Longest wait; None for no limit.
        survives: Other ranks of the job may be dead.

    Raises:
        CommTimeout, RankFailureError: As of ``wait_for_world``.
    """
    subject = wait_for_world(operation, timeout_s, members)
    world = runtime.world()
    if survives:
        made = create_surviving_group(members, subject)
    else:
        made = create_group(world.comm, members, subject.encode())
    return made, f"{world.key}/{subject}"


def wait_for_world(
    operation: str, timeout_s: float | None, members: Sequence[int] | None = None
) -> str:
    """Block until all members have called this function equally often for one operation.

    Calls that raised do not count, so a program may call again after a ``CommTimeout``.

    Collective: over ``members``, world ranks; over all ranks of the job if None.

    Returns:
        The name of this wait, the same on all members.

    Raises:
        CommTimeout: Not all ranks called it within ``timeout_s`` (None: no limit); names those
            missing, as far as this rank knows.
        RankFailureError: A rank's program ended more than 2 s ago.
    """
    global _world_barrier
    world = runtime.world(timeout_s)
    with _lock:
        if _world_barrier is None:
            _world_barrier = CreationBarrier(world.comm, _WORLD_TAG, range(world.size))
        ranks = list(range(world.size) if members is None else members)
        named = operation if members is None else f"{operation} of ranks {ranks}"
    where = f"rank {world.rank} of {world.size}: {operation}"
    awaited = world.everyone if members is None else rank_ranges.named(ranks)
    start = time.monotonic()

    def check(missing: Sequence[int]) -> None:
        if timeout_s is not None and time.monotonic() - start > timeout_s:
            reason = (
                f"{rank_ranges.named(missing)} did not come"
                if world.rank == ranks[0]
                else f"rank {ranks[0]} did not let it begin"
            )
            raise CommTimeout(f"{where} waits for {awaited}; {reason} within {timeout_s:g} s")

    return f"{named} {_world_barrier.wait(where, named, ranks, check)}"
