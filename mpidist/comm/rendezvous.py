"""A key-value store that lives on MPI, so that torch's rendezvous needs no address, no port and no environment variable.

World rank 0 keeps the table, and one of its threads answers the others. A request is a frame; a ``get`` or ``wait`` for a key
that is not there yet is parked at rank 0, which answers when the key comes. Nothing on a training step's path uses the store.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

from mpidist.comm import departures, faults, frame, meeting, runtime, torch_variables, watchdog
from mpidist.comm.library import MPI
from mpidist.errors import CommTimeout

_REQUEST_TAG = 1
_REPLY_TAGS = range(16, 16 + (1 << 14))  # one for each request under way, so that threads do not take each other's answers
_BYE = "bye"  # a client's last word, which has no answer
_BUSY_S = 2e-3  # after a request the server looks without sleeping for this long
_LONGEST_NAP_S = 10e-3  # an idle server costs a core 100 looks a second
_DEFAULT_TIMEOUT_S = 300.0
_ASK_AGAIN_S = 1.0  # a wait asks for its keys anew after this long

_lock = threading.Lock()
_store: MPIStore | None = None  # referenced here for the life of the process: C++ holds no reference of its own
_uses = itertools.count()


def rendezvous(url: str, **kwargs: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Serve ``init_method="mpi://"``: yield (store, rank, world size).

    Collective: over all ranks of the job.

    Raises:
        ValueError: ``rank`` or ``world_size`` was given and is not what MPI says; so for ``RANK`` and ``WORLD_SIZE`` in the
            keyword ``environ``.
        CommTimeout: Not all ranks came within torch's ``timeout``, at least 60 s.
        RankFailureError: A rank came to the end of its program more than 2 s ago.
    """
    timeout: timedelta | None = kwargs.get("timeout")
    environ: Mapping[str, str] = kwargs.get("environ", {})
    limit = meeting.start_limit(None if timeout is None else timeout.total_seconds() or None)
    world = runtime.world(limit)
    query = parse_qs(urlparse(url).query)
    for name, truth in (("rank", world.rank), ("world_size", world.size)):
        given = int(query.get(name, ["-1"])[0])
        if given not in (-1, truth):
            raise ValueError(
                f"rank {world.rank} of {world.size}: init_process_group was given {name}={given}, but MPI started this job with "
                f"{name}={truth}; leave it out, MPI knows it"
            )
    problem = torch_variables.disagreement(environ, world.rank, world.size)
    if problem is not None:
        raise ValueError(f"rank {world.rank} of {world.size}: {problem}")
    yield dist.PrefixStore(f"use{next(_uses)}", shared_store(limit)), world.rank, world.size


def shared_store(timeout_s: float | None = None) -> MPIStore:
    """Return the world's store.

    Collective: the first call, over all ranks of the job, which waits for them at most ``timeout_s``.
    """
    global _store
    world = runtime.world(timeout_s)
    with _lock:
        if _store is None or _store.generation != world.generation:
            meeting.of_world("the rendezvous mpi://", timeout_s)
            watchdog.start(world)
            _store = MPIStore(world)
        return _store


class KeyValueTable:
    """The table itself; verbs and their answers as ``torch.distributed.Store`` documents them."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        self._values[key] = value

    def read(self, key: str) -> bytes:
        """Return the value of a key that is there."""
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 if new; return the sum."""
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def append(self, key: str, value: bytes) -> None:
        """Put bytes behind those that are there."""
        self._values[key] = self._values.get(key, b"") + value

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Store ``desired`` if the value is ``expected``, or if there is none and ``expected`` is empty; return the value."""
        if key not in self._values:
            if expected:
                return expected
            self._values[key] = desired
        elif self._values[key] == expected:
            self._values[key] = desired
        return self._values[key]

    def delete(self, key: str) -> bool:
        """Remove a key; say whether it was there."""
        return self._values.pop(key, None) is not None

    def count(self) -> int:
        """Return the number of keys."""
        return len(self._values)

    def has(self, keys: list[str]) -> bool:
        """Say whether all keys are there."""
        return all(key in self._values for key in keys)


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
        word = bytes(frame.to_bytes((0, _BYE, ())))
        with faults.death_tolerated():
            self._mpi.Send((word, len(word), MPI.BYTE), 0, _REQUEST_TAG)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long ``get`` and ``wait`` wait."""
        self._timeout_s = timeout.total_seconds()

    def set(self, key: str, value: str | bytes) -> None:
        """See torch.distributed.Store.set."""
        self._call("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        """See torch.distributed.Store.get; blocks until the key is there."""
        self.wait([key])
        return bytes(self._call("read", key))

    def add(self, key: str, value: int) -> int:
        """See torch.distributed.Store.add."""
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
        # The table is asked again and again: whose key it is nobody knows, but this rank's watchdog knows who has ended.
        while not self._call("wait", list(keys), min(max(deadline - time.monotonic(), 0.0), _ASK_AGAIN_S)):
            if departures.have_left(self._others):
                raise departures.failure(f"a wait for the store's keys {list(keys)}", self._others)
            if time.monotonic() > deadline:
                ended = departures.among(self._others)
                told = f"; world ranks {', '.join(map(str, ended))} came to the end of the program" if ended else ""
                raise CommTimeout(f"the store's keys {list(keys)} did not come within {limit:g} s{told}")

    def clone(self) -> MPIStore:
        """Return a store of the same table."""
        return self

    # C++ looks these two up under their C++ names.
    deleteKey = delete_key
    getNumKeys = num_keys

    def _call(self, verb: str, *args: Any) -> Any:
        if self._server is not None:
            return self._server.call(verb, args)
        tag = _REPLY_TAGS[next(self._numbers) % len(_REPLY_TAGS)]
        request = bytes(frame.to_bytes((tag, verb, args)))
        self._mpi.Send((request, len(request), MPI.BYTE), 0, _REQUEST_TAG)
        # The server answers every request, a parked one at its time limit, and stays until all others have said goodbye.
        status, nap = MPI.Status(), 20e-6
        while (message := self._mpi.Improbe(0, tag, status)) is None:
            time.sleep(nap)
            nap = min(nap * 1.2, 1e-3)
        reply = bytearray(status.Get_count(MPI.BYTE))
        message.Recv((reply, len(reply), MPI.BYTE))
        return frame.from_bytes(reply)


class _Server:
    """Rank 0's table, its thread, and the requests that wait for a key."""

    def __init__(self, mpi: Any, world_size: int) -> None:
        self._mpi = mpi
        self._table = KeyValueTable()
        self._changed = threading.Condition()
        self._parked: list[tuple[int, int, list[str], float]] = []  # (rank, reply tag, keys, deadline)
        self._clients = set(range(1, world_size))
        self._is_closing = False
        if world_size > 1:
            self._thread = threading.Thread(target=runtime.guard_thread(self._run), name="mpidist-store", daemon=True)
            self._thread.start()
            runtime.close_at_exit(self, stage=2)

    def call(self, verb: str, args: tuple[Any, ...]) -> Any:
        """Execute a verb for rank 0 itself."""
        with self._changed:
            if verb == "wait":
                keys, limit = args
                return self._changed.wait_for(lambda: self._table.has(keys), limit)
            answer = getattr(self._table, verb)(*args)
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
            message = faults.matched_probe(self._mpi, _REQUEST_TAG, status)
            if message is not None:
                self._serve(message, status)
                last, nap = time.monotonic(), 50e-6
            elif time.monotonic() - last < _BUSY_S:
                os.sched_yield()
            else:
                time.sleep(nap)
                nap = min(nap * 2, _LONGEST_NAP_S)
                if self._is_closing:
                    self._clients.difference_update(faults.known_dead(self._mpi, range(self._mpi.Get_size())) or ())
            if self._parked:
                self._unpark()

    def _serve(self, message: Any, status: Any) -> None:
        request = bytearray(status.Get_count(MPI.BYTE))
        source = status.Get_source()
        message.Recv((request, len(request), MPI.BYTE))
        tag, verb, args = frame.from_bytes(request)
        if verb == _BYE:
            self._clients.discard(source)
        elif verb == "wait":
            keys, limit = args
            self._parked.append((source, tag, keys, time.monotonic() + limit))
        else:
            self._reply(source, tag, self.call(verb, args))

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

    def _reply(self, rank: int, tag: int, answer: Any) -> None:
        data = bytes(frame.to_bytes(answer))
        with faults.death_tolerated():
            self._mpi.Send((data, len(data), MPI.BYTE), rank, tag)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
