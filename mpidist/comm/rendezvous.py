"""A key-value store that lives on MPI, so that torch's rendezvous needs no address, no port and no environment variable.

World rank 0 keeps the table, and one of its threads answers the others. A request is a frame of
data (``key_value_table``); a ``get`` or ``wait`` for a key that is not there yet is parked at rank
0, which answers when the key comes. What is no request is logged and dropped, and the server goes
on. Nothing on a training step's path uses the store.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

from mpidist.comm import key_value_table, watchdog
from mpidist.comm.key_value_table import BYE, REPLY_TAGS, WAIT, KeyValueTable
from mpidist.comm.mpi import creation_barrier, exited_ranks, mpi_errors, runtime, torchrun_env
from mpidist.comm.mpi.library import MPI
from mpidist.errors import CommTimeout, FrameError

_REQUEST_TAG = 1
_BUSY_S = 2e-3  # after a request the server looks without sleeping for this long
_LONGEST_NAP_S = 10e-3  # an idle server costs a core 100 looks a second
_DEFAULT_TIMEOUT_S = 300.0
_ASK_AGAIN_S = 1.0  # a wait asks for its keys anew after this long

_log = logging.getLogger(__name__)

_lock = threading.Lock()
# referenced here for the life of the process: C++ holds no reference of its own
_store: MPIStore | None = None
_uses = itertools.count()


def rendezvous(url: str, **kwargs: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Serve ``init_method="mpi://"``: yield (store, rank, world size).

    Collective: over all ranks of the job.

    Raises:
        ValueError: ``rank`` or ``world_size`` was given and is not what MPI says; so for ``RANK``
            and ``WORLD_SIZE`` in the keyword ``environ``.
        CommTimeout: Not all ranks came within torch's ``timeout``, at least 60 s.
        RankFailureError: A rank came to the end of its program more than 2 s ago.
    """
    timeout: timedelta | None = kwargs.get("timeout")
    environ: Mapping[str, str] = kwargs.get("environ", {})
    limit = creation_barrier.start_limit(
        None if timeout is None else timeout.total_seconds() or None
    )
    world = runtime.world(limit)
    query = parse_qs(urlparse(url).query)
    for name, truth in (("rank", world.rank), ("world_size", world.size)):
        given = int(query.get(name, ["-1"])[0])
        if given not in (-1, truth):
            raise ValueError(
                f"rank {world.rank} of {world.size}: init_process_group was given {name}={given}, "
                "but MPI started this job with "
                f"{name}={truth}; leave it out, MPI knows it"
            )
    problem = torchrun_env.disagreement(environ, world.rank, world.size)
    if problem is not None:
        raise ValueError(f"rank {world.rank} of {world.size}: {problem}")
    yield dist.PrefixStore(f"use{next(_uses)}", shared_store(limit)), world.rank, world.size


def shared_store(timeout_s: float | None = None) -> MPIStore:
    """Return the world's store.

    Collective: the first call, over all ranks of the job, which waits for them at most
    ``timeout_s``.
    """
    global _store
    world = runtime.world(timeout_s)
    with _lock:
        if _store is None or _store.generation != world.generation:
            creation_barrier.wait_for_world("the rendezvous mpi://", timeout_s)
            watchdog.start(world)
            _store = MPIStore(world)
        return _store


class MPIStore(dist.Store):
    """The store as torch sees it, on any rank; a plain Python subclass, which C++ calls back."""

    def __init__(self, world: runtime.World) -> None:
        super().__init__()
        self.generation = world.generation
        self._mpi = world.comm.Dup()
        self._others = [rank for rank in range(world.size) if rank != world.rank]
        self._numbers = itertools.count()
        self._timeout_s = _DEFAULT_TIMEOUT_S
        self._server = _Server(self._mpi, world.size) if world.rank == 0 else None
        if self._server is None:
            runtime.close_at_exit(self, stage=2)

    def close(self, timeout_s: float) -> None:
        """Tell the server that this rank asks nothing any more."""
        word = key_value_table.request(0, BYE, ())
        with mpi_errors.death_tolerated():
            self._mpi.Send((word, len(word), MPI.BYTE), 0, _REQUEST_TAG)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long ``get`` and ``wait`` wait."""
        self._timeout_s = timeout.total_seconds()

    def set(self, key: str, value: str | bytes) -> None:
        """See torch.distributed.Store.set."""
        self._call("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        """See torch.distributed.Store.get; blocks until the key is there."""
        while True:
            self.wait([key])
            value = self._call("read", key)
            if value is not None:  # else somebody has deleted it in between
                return bytes(value)

    def add(self, key: str, value: int) -> int:
        """See torch.distributed.Store.add.

        Raises:
            ValueError: The key's value is no number.
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

        Raises:
            CommTimeout: A key did not come in time.
            RankFailureError: Every other rank came to the end of its program more than 2 s ago.
        """
        limit = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + limit
        # The table is asked again and again: whose key it is nobody knows, but this rank's watchdog
        # knows who has ended.
        while not self._call(
            WAIT, list(keys), min(max(deadline - time.monotonic(), 0.0), _ASK_AGAIN_S)
        ):
            if exited_ranks.all_ended(self._others):
                raise exited_ranks.failure(
                    f"a wait for the store's keys {list(keys)}", self._others
                )
            if time.monotonic() > deadline:
                ended = exited_ranks.among(self._others)
                told = (
                    f"; world ranks {', '.join(map(str, ended))} came to the end of the program"
                    if ended
                    else ""
                )
                raise CommTimeout(
                    f"the store's keys {list(keys)} did not come within {limit:g} s{told}"
                )

    def clone(self) -> MPIStore:
        """Return a store of the same table."""
        return self

    # C++ looks these two up under their C++ names.
    deleteKey = delete_key
    getNumKeys = num_keys

    def _call(self, verb: str, *args: Any) -> Any:
        if self._server is not None:
            return self._server.call(verb, args)
        tag = REPLY_TAGS[next(self._numbers) % len(REPLY_TAGS)]
        request = key_value_table.request(tag, verb, args)
        self._mpi.Send((request, len(request), MPI.BYTE), 0, _REQUEST_TAG)
        # The server answers every request, a parked one at its time limit, and stays until all
        # others have said goodbye.
        status, nap = MPI.Status(), 20e-6
        while (message := self._mpi.Improbe(0, tag, status)) is None:
            time.sleep(nap)
            nap = min(nap * 1.2, 1e-3)
        reply = bytearray(status.Get_count(MPI.BYTE))
        message.Recv((reply, len(reply), MPI.BYTE))
        return key_value_table.answer_of(reply)


class _Server:
    """Rank 0's table, its thread, and the requests that wait for a key."""

    def __init__(self, mpi: Any, world_size: int) -> None:
        self._mpi = mpi
        self._table = KeyValueTable()
        self._changed = threading.Condition()
        # (rank, reply tag, keys, deadline)
        self._parked: list[tuple[int, int, list[str], float]] = []
        # replies under way: nobody waits for one that a client does not take
        self._sends: list[tuple[Any, bytes]] = []
        self._clients = set(range(1, world_size))
        self._is_closing = False
        if world_size > 1:
            self._thread = threading.Thread(
                target=runtime.guard_thread(self._run), name="mpidist-store", daemon=True
            )
            self._thread.start()
            runtime.close_at_exit(self, stage=2)

    def call(self, verb: str, args: Sequence[Any]) -> Any:
        """Execute a verb for rank 0 itself, which has been checked.

        Raises:
            ValueError: It cannot be done on the value that is there.
        """
        with self._changed:
            if verb == WAIT:
                keys, limit = args
                return self._changed.wait_for(lambda: self._table.has(keys), limit)
            answer = self._table.answer(verb, args)
            self._changed.notify_all()
            return answer

    def close(self, timeout_s: float) -> None:
        """Serve until every other rank has said goodbye or died; whatever it waits for, MPI's own end would wait for, too."""
        self._is_closing = True
        self._thread.join()

    def _run(self) -> None:
        status, last = MPI.Status(), time.monotonic()
        nap = _LONGEST_NAP_S
        while self._clients:
            message = mpi_errors.matched_probe(self._mpi, _REQUEST_TAG, status)
            if message is not None:
                self._serve(message, status)
                last, nap = time.monotonic(), 50e-6
            elif time.monotonic() - last < _BUSY_S:
                os.sched_yield()
            else:
                time.sleep(nap)
                nap = min(nap * 2, _LONGEST_NAP_S)
                if self._is_closing:
                    self._clients.difference_update(
                        mpi_errors.known_dead(self._mpi, range(self._mpi.Get_size())) or ()
                    )
            if self._parked:
                self._unpark()
            if self._sends:
                self._sends = [
                    (request, data)
                    for request, data in self._sends
                    if not mpi_errors.is_over(request)
                ]

    def _serve(self, message: Any, status: Any) -> None:
        request = bytearray(status.Get_count(MPI.BYTE))
        source = status.Get_source()
        message.Recv((request, len(request), MPI.BYTE))
        try:
            tag, verb, args = key_value_table.request_of(request)
        except FrameError as error:
            _log.warning(
                "the store drops a message of %d bytes of rank %d, which is no request: %s",
                len(request),
                source,
                error,
            )
            return
        if verb == BYE:
            self._clients.discard(source)
        elif verb == WAIT:
            keys, limit = args
            self._parked.append((source, tag, keys, time.monotonic() + limit))
        else:
            try:
                answer = self.call(verb, args)
            except ValueError as error:
                self._reply(source, tag, None, str(error))
            else:
                self._reply(source, tag, answer)

    def _unpark(self) -> None:
        now, still = time.monotonic(), []
        for source, tag, keys, deadline in self._parked:
            with self._changed:
                there = self._table.has(keys)
            if there or now > deadline:
                self._reply(source, tag, there)
            else:
                still.append((source, tag, keys, deadline))
        self._parked = still

    def _reply(self, rank: int, tag: int, answer: Any, problem: str | None = None) -> None:
        data = key_value_table.reply(answer, problem)
        with mpi_errors.death_tolerated():
            self._sends.append((self._mpi.Isend((data, len(data), MPI.BYTE), rank, tag), data))


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
