"""Rendezvous ``mpi://`` of torch: a key-value store over MPI, without address, port or environment.

A thread of the first rank keeps the table and answers the other ranks (``store_server``). A request
is a frame of data (``key_value_table``). A request for a key that is not set yet is answered when
the key is set. Messages that are not requests are logged and dropped. A training step does not use
the store.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

from mpidist.comm.mpi import (
    closed_communicators,
    creation_barrier,
    exited_ranks,
    forked_child,
    launcher_env,
    mpi_errors,
    runtime,
    torchrun_env,
)
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import Mpi
from mpidist.comm.store import key_value_table
from mpidist.comm.store.key_value_table import BYE, WAIT
from mpidist.comm.store.store_server import END_TAG, REQUEST_TAG, StoreServer
from mpidist.comm.watchdog import watchdog
from mpidist.errors import CommTimeout, GroupError, MpidistError

_REQUEST_S = 1.0  # longest time of one request of a wait
_LONGEST_SLEEP_S = 1e-3  # between two looks for a reply
_KEPT = 2  # stores of former worlds

_lock = threading.Lock()
# By world ranks. Referenced for the life of the world, because C++ holds no reference.
_stores: dict[tuple[int, ...], MPIStore] = {}
# Of the last worlds that this process has left: what is called on one of them says so. Not of all,
# which a job that rebuilds its world again and again would keep.
_former: deque[MPIStore] = deque(maxlen=_KEPT)


def rendezvous(url: str, **kwargs: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Serve ``init_method="mpi://"``: yield (store, rank, world size).

    Collective: over all ranks of the job. With a ``world_size`` below the job's and MPI's own
    ``rank``, over the first ``world_size`` ranks.

    Raises:
        ValueError: ``rank`` or ``world_size``, or ``RANK`` or ``WORLD_SIZE`` in the keyword
            ``environ``, differs from MPI's value, and this is not one of the first ``world_size``
            ranks with its own ``rank``.
        CommTimeout: Not all of these ranks called it within torch's ``timeout``, at least 60 s.
        RankFailureError: A rank's program ended more than 2 s ago.
    """
    timeout: timedelta | None = kwargs.get("timeout")
    environ: Mapping[str, str] = kwargs.get("environ", {})
    limit = creation_barrier.start_limit(
        None if timeout is None else timeout.total_seconds() or None
    )
    world = runtime.world(limit)
    query = parse_qs(urlparse(url).query)
    rank, size = (int(query.get(name, ["-1"])[0]) for name in ("rank", "world_size"))
    is_of_first = rank == world.rank < size < world.size
    problem = None if is_of_first else _wrong_number(world, rank, size)
    problem = problem or torchrun_env.disagreement(environ, world.rank, world.size)
    if problem is not None:
        raise ValueError(f"rank {world.rank} of {world.size}: {problem}")
    store = shared_store(limit, range(size) if is_of_first else None)
    yield store.next_use(), world.rank, size if is_of_first else world.size


def _wrong_number(world: runtime.World, rank: int, size: int) -> str | None:
    """Return why arguments of ``init_process_group`` contradict this job, or None (-1: not given).

    Pure.
    """
    if world.size == 1 < size:
        return launcher_env.alone(size, f"init_process_group's world_size={size}")
    for name, given, truth in (("rank", rank, world.rank), ("world_size", size, world.size)):
        if given not in (-1, truth):
            problem = (
                f"init_process_group was given {name}={given}, but MPI started this job with "
                f"{name}={truth}; leave it out, MPI knows it"
            )
            return problem + (group_of_some(size) if 0 < size < world.size else "")
    return None


def group_of_some(size: int) -> str:
    """Return what to write for a group of fewer ranks than the job has. Pure."""
    return (
        f". With world_size={size} and MPI's own rank as rank=, ranks 0 to {size - 1} of the job "
        "form a group without the others. For other ranks write, on all ranks of the job, "
        'dist.init_process_group("mpidist"); group = dist.new_group([...]), and give that group to '
        "the collectives and to DDP (process_group=group)"
    )


def shared_store(timeout_s: float | None = None, members: Sequence[int] | None = None) -> MPIStore:
    """Return the store of all ranks of the job, or of ``members``.

    Collective: the first call, over these ranks, which waits for them at most ``timeout_s``.
    """
    operation = "the rendezvous mpi://"
    world = runtime.world(timeout_s)
    ranks = tuple(range(world.size) if members is None else members)
    with _lock:
        store = _stores.get(ranks)
        if store is None:
            if members is None:
                creation_barrier.wait_for_world(operation, timeout_s)
                mpi = world.comm.Dup()
            else:
                mpi, _ = creation_barrier.create_world_group(operation, ranks, timeout_s)
            watchdog.start(world)
            store = _stores[ranks] = MPIStore(mpi, ranks)
        return store


def _uses() -> list[str]:
    is_used = any(store.is_used for store in _stores.values())
    return ["torch's default group"] if is_used and dist.is_initialized() else []


def _drop() -> None:
    for store in _stores.values():
        store.leave()
        _former.append(store)
    _stores.clear()


runtime.belongs_to_world(_drop, _uses)


class StoreTimeout(CommTimeout, dist.DistStoreError):
    """A key of the store was not set in time."""


class MPIStore(dist.Store):
    """The store on one rank; torch's C++ calls its methods.

    Args:
        mpi: Communicator of the ranks that share the store, for this store alone.
        world_ranks: Their world ranks.

    Attributes:
        is_used: A rendezvous has been given the store.
        timeout: Longest wait for a key, which torch's C++ holds, and sets without a call of ours.
    """

    timeout: timedelta

    def __init__(self, mpi: Mpi, world_ranks: Sequence[int]) -> None:
        super().__init__()
        self.is_used = False
        self._is_closed = self._is_childs = False
        self._mpi = mpi
        rank = mpi.Get_rank()
        self._world_ranks = tuple(world_ranks)
        self._others = [other for place, other in enumerate(world_ranks) if place != rank]
        self._numbers = itertools.count()
        # Numbers of the requests whose replies have not been received.
        self._unanswered: set[int] = set()
        self._uses = itertools.count()
        self._server = StoreServer(self._mpi, len(world_ranks)) if rank == 0 else None
        if self._server is None:
            runtime.close_at_exit(self, stage=2)
        forked_child.register(self)

    def next_use(self) -> dist.PrefixStore:
        """Return the store with keys of its own, for one rendezvous of these ranks."""
        self.is_used = True
        return dist.PrefixStore(f"use{next(self._uses)}", self)

    def close(self, timeout_s: float) -> None:
        """Send the server the end of this rank's requests.

        Waits at most ``timeout_s`` for replies to requests that an exception has left.
        """
        if self._is_closed:
            return
        self._is_closed = True
        deadline = time.monotonic() + timeout_s
        word = key_value_table.request(0, BYE, ())
        with mpi_errors.death_tolerated():
            while self._unanswered and time.monotonic() < deadline:
                for number in list(self._unanswered):
                    self._receive(number)
                time.sleep(_LONGEST_SLEEP_S)
            self._mpi.Send((word, len(word), MPI.BYTE), 0, REQUEST_TAG)

    def leave(self) -> None:
        """End this rank's use of the store, and give up its communicator; blocks: no."""
        if self._server is not None:
            self._is_closed = True
            self._server.leave()
        else:
            self.close(0.0)
            closed_communicators.add(self._mpi, END_TAG)

    def leave_to_parent(self) -> None:
        """Refuse every later call; called in a forked child, which has no requests."""
        self._is_closed = self._is_childs = True

    def set(self, key: str, value: str | bytes) -> None:
        """See torch.distributed.Store.set."""
        self._call("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        """See torch.distributed.Store.get; blocks until the key is set."""
        while True:
            self.wait([key])
            value = self._call("read", key)
            # None if the key was deleted in between.
            if value is not None:
                return bytes(value)

    def add(self, key: str, value: int) -> int:
        """See torch.distributed.Store.add.

        Raises:
            ValueError: The key's value is not a number.
        """
        return int(self._call("add", key, value))

    def append(self, key: str, value: str | bytes) -> None:
        """See torch.distributed.Store.append."""
        self._call("append", key, _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """See torch.distributed.Store.compare_set."""
        return bytes(self._call("compare_set", key, _bytes(expected), _bytes(desired)))

    def check(self, keys: list[str]) -> bool:
        """See torch.distributed.Store.check."""
        return bool(self._call("has", list(keys)))

    def delete_key(self, key: str) -> bool:
        """See torch.distributed.Store.delete_key."""
        return bool(self._call("delete", key))

    def num_keys(self) -> int:
        """See torch.distributed.Store.num_keys."""
        return int(self._call("count"))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """See torch.distributed.Store.wait.

        Args:
            keys: The keys.
            timeout: None for the store's; 0 for no limit.

        Raises:
            StoreTimeout: A key was not set in time.
            RankFailureError: The programs of all other ranks ended more than 2 s ago, or the first
                rank, which keeps the table, has died.
        """
        limit = (self.timeout if timeout is None else timeout).total_seconds() or math.inf
        deadline = time.monotonic() + limit
        # The wait is a series of short requests. Between them this rank checks for ranks that have
        # ended; which rank would set the key is unknown.
        while not self._call(
            WAIT, list(keys), min(max(deadline - time.monotonic(), 0.0), _REQUEST_S)
        ):
            if exited_ranks.all_ended(self._others):
                raise exited_ranks.failure(
                    f"a wait for the store's keys {list(keys)}", self._others
                )
            if time.monotonic() > deadline:
                ended = exited_ranks.among(self._others)
                suffix = f"; world ranks {', '.join(map(str, ended))} exited" if ended else ""
                raise StoreTimeout(
                    f"the store's keys {list(keys)} did not come within {limit:g} s{suffix}"
                )

    def clone(self) -> MPIStore:
        """Return a store of the same table."""
        return self

    # torch's C++ calls these two by their C++ names.
    deleteKey = delete_key
    getNumKeys = num_keys

    def _call(self, verb: str, *args: object) -> Any:
        if self._is_childs:
            raise MpidistError(
                "a store of mpi:// was called in a process forked from the rank, which cannot "
                "communicate; keep its calls in the parent"
            )
        if self._is_closed:
            raise GroupError("a store of mpi:// was called after this process left its world")
        if self._server is not None:
            return self._server.call(verb, args)
        number = next(self._numbers)
        try:
            return self._asked(number, key_value_table.request(number, verb, args))
        except Exception as error:
            if not mpi_errors.is_mpi_error(error):
                raise
            where = f"the store's {verb}, which world rank {self._world_ranks[0]} answers"
            raise mpi_errors.explain(error, where, self._mpi, self._world_ranks) from error

    def _asked(self, number: int, request: bytes) -> Any:
        """Send the server a request; return its answer.

        Raises:
            ValueError: The server refused the request.
        """
        self._unanswered.add(number)
        self._mpi.Send((request, len(request), MPI.BYTE), 0, REQUEST_TAG)
        # No timeout, because the server answers every request, a waiting one at its deadline, and
        # runs until all ranks have sent ``BYE``.
        sleep_s = 20e-6
        while (reply := self._receive(number)) is None or reply[0] != number:
            time.sleep(sleep_s)
            sleep_s = min(sleep_s * 1.2, _LONGEST_SLEEP_S)
        _, answer, problem = reply
        if problem is not None:
            raise ValueError(problem)
        return answer

    def _receive(self, number: int) -> tuple[int, Any, str | None] | None:
        """Receive a reply under the tag of a request, if there is one: its own, or an older one."""
        status = MPI.Status()
        message = self._mpi.Improbe(0, key_value_table.reply_tag(number), status)
        if message is None:
            return None
        data = bytearray(status.Get_count(MPI.BYTE))
        message.Recv((data, len(data), MPI.BYTE))
        reply = key_value_table.reply_of(data)
        self._unanswered.discard(reply[0])
        return reply


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
