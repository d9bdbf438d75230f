"""A meeting of ranks before a call of MPI that none of them could leave.

MPI makes and divides communicators by calls that block until the last member has come, and offers
none that can be given up. So the members meet by messages first: each sends a word to the first of
them, which answers all when the last word has come. Until then every one of them polls, and leaves
when a member has ended, has died, or when the time is over. W members send 2·(W - 1) messages of 16
bytes.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from mpidist.comm.mpi import exited_ranks, mpi_errors, runtime
from mpidist.comm.mpi.library import MPI
from mpidist.errors import CommTimeout, RankFailureError

_WORD_BYTES = 16
_SPIN_S = 500e-6
_PAUSE_S = 50e-6
_CHECK_S = 20e-3  # between two looks at what would end the wait
_LEAST_START_S = 60.0
_WORLD_TAG = 1  # on the world's own communicator, where nothing else is sent

_lock = threading.Lock()
_of_world: Meeting | None = None
_numbers: defaultdict[str, itertools.count[int]] = defaultdict(lambda: itertools.count(1))


class Meeting:
    """The meetings of one communicator; any number of threads may be in one at a time.

    Args:
        mpi: The communicator; messages of ``tag`` on it are this object's alone.
        world_ranks: Its members' ranks in the world.
    """

    def __init__(self, mpi: Any, tag: int, world_ranks: Sequence[int]) -> None:
        self._mpi = mpi
        self._tag = tag
        self._rank: int = mpi.Get_rank()
        self._world_ranks = world_ranks
        self._receiving = threading.Lock()
        self._words: Counter[tuple[int, bytes]] = Counter()  # that have come: (sender, word)

    def meet(
        self,
        what: str,
        subject: str,
        members: Sequence[int],
        check: Callable[[Sequence[int]], None],
    ) -> None:
        """Return when all members have called this.

        Collective: over ``members`` (ranks of the communicator), all with the same list and
        subject.

        Args:
            what: Names the rank, the group and the operation, for the error.
            subject: Keeps meetings of the same members apart.
            check: Called some 50 times a second with the world ranks that are not known to have
                come; raises to end the wait.

        Raises:
            RankFailureError: A member came to the end of its program more than 2 s ago, or is dead
                (ULFM).
            BaseException: What ``check`` raised.
        """
        word = hashlib.blake2b(
            repr((subject, list(members))).encode(), digest_size=_WORD_BYTES
        ).digest()
        others = [member for member in members if member != self._rank]
        if not others:
            return
        if self._rank == members[0]:
            self._wait_for(what, others, word, check)
            for member in others:
                self._send(member, word)
        else:
            self._send(members[0], word)
            self._wait_for(what, [members[0]], word, check, others)

    def _wait_for(
        self,
        what: str,
        senders: Sequence[int],
        word: bytes,
        check: Callable[..., None],
        needed: Sequence[int] = (),
    ) -> None:
        start = time.monotonic()
        checked = start
        while missing := [sender for sender in senders if not self._words[sender, word]]:
            if self._receive():
                continue
            now = time.monotonic()
            if now - checked > _CHECK_S:
                checked = now
                absent = [self._world_ranks[member] for member in needed or missing]
                gone = exited_ranks.ended(absent)
                if gone:
                    raise exited_ranks.failure(what, gone)
                dead = set(mpi_errors.known_dead(self._mpi, self._world_ranks) or ()).intersection(
                    absent
                )
                if dead:
                    names = ", ".join(map(str, sorted(dead)))
                    raise RankFailureError(
                        f"{what} waits for world ranks that failed: {names}", sorted(dead)
                    )
                check(absent)
            if now - start > _SPIN_S:
                time.sleep(_PAUSE_S)
        with self._receiving:
            for sender in senders:
                self._words[sender, word] -= 1
                if not self._words[sender, word]:
                    del self._words[sender, word]

    def _receive(self) -> bool:
        with self._receiving:
            status = MPI.Status()
            message = mpi_errors.matched_probe(self._mpi, self._tag, status)
            if message is None:
                return False
            word = bytearray(_WORD_BYTES)
            source = status.Get_source()
            message.Recv((word, _WORD_BYTES, MPI.BYTE))
            self._words[source, bytes(word)] += 1
            return True

    def _send(self, to: int, word: bytes) -> None:
        with mpi_errors.death_tolerated():
            self._mpi.Send((word, _WORD_BYTES, MPI.BYTE), to, self._tag)


def start_limit(timeout_s: float | None) -> float | None:
    """Return how long the beginning waits for all ranks: its timeout, at least 60 s, as processes start unevenly."""
    return None if timeout_s is None else max(timeout_s, _LEAST_START_S)


def of_world(operation: str, timeout_s: float | None) -> None:
    """Return when all ranks of the job have called this for the same operation equally often.

    Collective: over all ranks of the job.

    Raises:
        CommTimeout: Not all came within ``timeout_s`` (None: no limit); names those that are
            missing as far as this rank knows.
        RankFailureError: A rank came to the end of its program more than 2 s ago.
    """
    global _of_world
    world = runtime.world(timeout_s)
    with _lock:
        if _of_world is None or _of_world._mpi is not world.comm:
            _of_world = Meeting(world.comm, _WORLD_TAG, range(world.size))
        subject = f"{operation} {next(_numbers[operation])}"
    what = f"rank {world.rank} of {world.size}: {operation}"
    start = time.monotonic()

    def check(missing: Sequence[int]) -> None:
        if timeout_s is not None and time.monotonic() - start > timeout_s:
            who = (
                f"rank {', '.join(map(str, missing))} did not come"
                if world.rank == 0
                else "rank 0 did not let it begin"
            )
            raise CommTimeout(
                f"{what} waits for all ranks of the job; {who} within {timeout_s:g} s"
            )

    _of_world.meet(what, subject, range(world.size), check)
