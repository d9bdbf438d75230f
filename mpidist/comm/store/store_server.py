"""Server of the store ``mpi://``: rank 0's table, its thread, and waiting requests."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from mpidist.comm.mpi import agreement_lock, closed_communicators, mpi_errors, runtime
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import MatchedMessage, Mpi
from mpidist.comm.store import key_value_table
from mpidist.comm.store.key_value_table import BYE, WAIT, KeyValueTable
from mpidist.errors import FrameError

REQUEST_TAG = 1
END_TAG = 2  # of the barrier before the communicator is freed
_BUSY_S = 2e-3  # of probes without a sleep after a request
_LONGEST_SLEEP_S = 10e-3  # an idle server probes 100 times a second

_log = logging.getLogger(__name__)


class StoreServer:
    """Table of the store, and the thread that answers the other ranks."""

    def __init__(self, mpi: Mpi, world_size: int) -> None:
        self._mpi = mpi
        self._table = KeyValueTable()
        self._changed = threading.Condition()
        # Requests that wait for keys: rank, number, keys, deadline.
        self._waiting: list[tuple[int, int, list[str], float]] = []
        # Replies under way; the server does not wait for their completion.
        self._sends: list[tuple[MPI.Request, bytes]] = []
        self._clients = set(range(1, world_size))
        self._is_closing = False
        # The process has left the world, and the thread has ended; guarded by ``_changed``.
        self._is_left, self._has_ended = False, world_size == 1
        if world_size > 1:
            self._thread = threading.Thread(
                target=runtime.guard_thread(self._run), name="mpidist-store", daemon=True
            )
            self._thread.start()
            runtime.close_at_exit(self, stage=2)

    def call(self, verb: str, args: Sequence[Any]) -> Any:
        """Execute a checked request, of rank 0 or of another rank.

        Raises:
            ValueError: The verb is not defined for the present value.
        """
        with self._changed:
            if verb == WAIT:
                keys, limit = args
                return self._changed.wait_for(lambda: self._table.has(keys), limit)
            answer = self._table.answer(verb, args)
            self._changed.notify_all()
            return answer

    def close(self, timeout_s: float) -> None:
        """Serve until every other rank has sent ``BYE`` or died.

        MPI_Finalize would wait for the same ranks.
        """
        self._is_closing = True
        self._thread.join()

    def leave(self) -> None:
        """Give up the communicator when every other rank has sent ``BYE``; blocks: no.

        Other ranks may need the store for longer than this process stays in the world.
        """
        with self._changed:
            self._is_left = True
            if self._has_ended:
                closed_communicators.add(self._mpi, END_TAG)

    def _run(self) -> None:
        self._serve_all()
        with self._changed:
            self._has_ended = True
            if self._is_left:
                closed_communicators.add(self._mpi, END_TAG)

    def _serve_all(self) -> None:
        status, last = MPI.Status(), time.monotonic()
        sleep_s = _LONGEST_SLEEP_S
        while self._clients:
            message = mpi_errors.matched_probe(self._mpi, REQUEST_TAG, status)
            if message is not None:
                self._serve(message, status)
                last, sleep_s = time.monotonic(), 50e-6
            elif time.monotonic() - last < _BUSY_S:
                os.sched_yield()
            else:
                time.sleep(sleep_s)
                sleep_s = min(sleep_s * 2, _LONGEST_SLEEP_S)
                if self._is_closing or self._is_left:
                    self._clients.difference_update(
                        mpi_errors.known_dead(self._mpi, range(self._mpi.Get_size())) or ()
                    )
            if self._waiting:
                self._answer_waiting()
            if self._sends:
                self._sends = [
                    (request, data)
                    for request, data in self._sends
                    if not mpi_errors.is_over(request)
                ]

    def _serve(self, message: MPI.Message | MatchedMessage, status: MPI.Status) -> None:
        request = bytearray(status.Get_count(MPI.BYTE))
        source = status.Get_source()
        with agreement_lock.lock:
            message.Recv((request, len(request), MPI.BYTE))
        try:
            number, verb, args = key_value_table.request_of(request)
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
            self._waiting.append((source, number, keys, time.monotonic() + limit))
        else:
            try:
                answer = self.call(verb, args)
            except ValueError as error:
                self._reply(source, number, None, str(error))
            else:
                self._reply(source, number, answer)

    def _answer_waiting(self) -> None:
        now, waiting = time.monotonic(), []
        for source, number, keys, deadline in self._waiting:
            with self._changed:
                is_there = self._table.has(keys)
            if is_there or now > deadline:
                self._reply(source, number, is_there)
            else:
                waiting.append((source, number, keys, deadline))
        self._waiting = waiting

    def _reply(self, rank: int, number: int, answer: object, problem: str | None = None) -> None:
        data = key_value_table.reply(number, answer, problem)
        tag = key_value_table.reply_tag(number)
        with mpi_errors.death_tolerated(), agreement_lock.lock:
            self._sends.append((self._mpi.Isend((data, len(data), MPI.BYTE), rank, tag), data))
