"""Posted-receive queues: receives of users' messages, matched by MPI_Improbe in the order of posting (MPI-4.1 §3.5, §3.8.2).

MPI gets a receive once its message is matched and known to fit, because Open MPI writes a longer
message past the end of the receive before it reports the truncation (``matched``). Until then the
receive waits in its group's queue. A queue advances

- in the thread that posts a receive, or that waits for any message of the process;
- every few milliseconds in a thread of this module, while receives are posted and no thread waits
  for them: the owner may be in a blocking collective, and the sender of a long message in a send
  that ends when the message is matched.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from mpidist.comm.memory.device_request import start_request
from mpidist.comm.memory.stream import Device
from mpidist.comm.mpi import runtime
from mpidist.comm.mpi.library import MPI
from mpidist.errors import GroupError

# pauses of the thread between two looks; they grow while nothing is matched
_SHORTEST_S, _LONGEST_S = 5e-4, 2e-3
# Waking the thread costs the one that posts tens of microseconds, so it stays awake between the
# receives of a loop.
_LINGER_S = 0.1
_LOOKS = 8


class PostedReceive:
    """One receive, with the interface of an MPI request.

    ``Test`` raises nothing: what went wrong is in ``error`` once it has returned True.

    Attributes:
        source: The sender's rank, or ``MPI.ANY_SOURCE``.
        tag: The message's tag.
        nbytes: Length of the memory.
        error: What MPI raised, or None.
        sender: The sender's rank, once matched.
        received: Length of the message, once matched. A longer one is received elsewhere, and the
            memory left as it was.
    """

    __slots__ = (
        "_device",
        "_queue",
        "_request",
        "_space",
        "error",
        "nbytes",
        "received",
        "sender",
        "source",
        "tag",
    )

    def __init__(
        self,
        queue: ReceiveQueue,
        space: tuple[Any, int, Any],
        source: int,
        tag: int,
        device: Device | None,
    ) -> None:
        self._queue = queue
        self._space = space
        self._device = device
        self._request: Any = None
        self.source = source
        self.tag = tag
        self.nbytes = space[1]
        self.error: Exception | None = None
        self.sender = self.received = -1

    def Test(self, status: Any = None) -> bool:
        """See MPI_Test; ``status`` is not filled."""
        if self._request is None and self.error is None:
            self._queue.match(self)
        if self.error is not None:
            return True
        try:
            return self._request is not None and bool(self._request.Test())
        except Exception as error:
            self.error = error
            return True

    def Wait(self, status: Any = None) -> None:
        """See MPI_Wait."""
        while not self.Test():
            time.sleep(_SHORTEST_S)

    def Cancel(self) -> None:
        """See MPI_Cancel: withdraw it, unless it is matched."""
        self._queue.withdraw(self)

    def accepts(self, source: int, tag: int) -> bool:
        """Say whether a message matches."""
        return self.tag == tag and self.source in (source, MPI.ANY_SOURCE)

    def start(self, message: Any, sender: int, received: int) -> None:
        """Have MPI receive the matched message."""
        self.sender, self.received = sender, received
        space = (
            self._space if received <= self.nbytes else (bytearray(received), received, MPI.BYTE)
        )
        try:
            self._request = start_request(self._device, message.Irecv, space)
        except Exception as error:
            self.error = error


class ReceiveQueue:
    """The posted receives of one group that no message has matched yet.

    Args:
        mpi: The group's communicator.
    """

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._posted: list[PostedReceive] = []
        self._patterns: Counter[tuple[int, int]] = Counter()  # (source, tag) of the posted ones
        self._lock = threading.Lock()
        self._status = MPI.Status()  # of the thread that holds the lock

    def post(
        self,
        space: tuple[Any, int, Any],
        source: int,
        tag: int,
        waits: bool,
        device: Device | None = None,
    ) -> PostedReceive:
        """Post a receive.

        Args:
            space: Memory, its length in bytes, ``MPI.BYTE``.
            waits: The calling thread waits for it next, and so advances the queue by itself.
            device: Of the memory; None for the host's.
        """
        receive = PostedReceive(self, space, source, tag, device)
        with self._lock:
            self._posted.append(receive)
            self._patterns[source, tag] += 1
            # Alone: to probe for all patterns each time would take a square of their number.
            self._match(((source, tag),))
        if self._posted and not waits:
            _poller.watch(self)
        return receive

    def match(self, receive: PostedReceive | None = None) -> bool:
        """Start the receives whose messages have arrived; say whether there were any.

        Args:
            receive: Probe for messages of its source and tag alone.
        """
        if not self._posted or not self._lock.acquire(blocking=False):
            return False
        try:
            if receive is None:
                return self._match(tuple(self._patterns))
            if len(self._posted) == 1 and self._posted[0] is receive:
                return self._look(receive)
            return self._match(((receive.source, receive.tag),))
        finally:
            self._lock.release()

    def withdraw(self, receive: PostedReceive) -> None:
        """Remove a receive that no message has matched."""
        with self._lock:
            if receive in self._posted:
                self._fail((receive,), GroupError("the receive was withdrawn"))

    def close(self) -> None:
        """Withdraw all receives; MPI's communicator may be freed afterwards."""
        with self._lock:
            self._fail(
                tuple(self._posted), GroupError("the group was closed while a receive was posted")
            )

    def drain(self) -> list[tuple[int, int, int]]:
        """Receive what has arrived and no receive has matched; return source, tag and length of each message.

        MPICH gives a freed communicator's context to the next one, whose receives would match such
        messages.
        """
        status, found = MPI.Status(), []
        while (message := self._mpi.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
            length = status.Get_count(MPI.BYTE)
            found.append((status.Get_source(), status.Get_tag(), length))
            message.Recv((bytearray(length), length, MPI.BYTE))
        return found

    def is_empty(self) -> bool:
        """Say whether no receive waits for its match."""
        return not self._posted

    def _look(self, receive: PostedReceive) -> bool:
        # The usual case, a thread that waits for the one receive there is: several probes for one
        # round of Python.
        probe, status, source, tag = self._mpi.Improbe, self._status, receive.source, receive.tag
        try:
            for _ in range(_LOOKS):
                message = probe(source, tag, status)
                if message is not None:
                    self._remove(receive)
                    receive.start(message, status.Get_source(), status.Get_count(MPI.BYTE))
                    return True
        except Exception as error:
            self._fail((receive,), error)
        return False

    def _match(self, patterns: Iterable[tuple[int, int]]) -> bool:
        has_matched, status = False, self._status
        for pattern in patterns:
            # One message a turn; it goes to the first receive that accepts it, which may be another
            # one with a wildcard.
            while pattern in self._patterns:
                try:
                    message = self._mpi.Improbe(*pattern, status)
                except Exception as error:
                    self._fail(
                        tuple(
                            other for other in self._posted if (other.source, other.tag) == pattern
                        ),
                        error,
                    )
                    break
                if message is None:
                    break
                source, tag, length = (
                    status.Get_source(),
                    status.Get_tag(),
                    status.Get_count(MPI.BYTE),
                )
                taker = next(other for other in self._posted if other.accepts(source, tag))
                self._remove(taker)
                taker.start(message, source, length)
                has_matched = True
        return has_matched

    def _remove(self, receive: PostedReceive) -> None:
        self._posted.remove(receive)
        pattern = (receive.source, receive.tag)
        self._patterns[pattern] -= 1
        if not self._patterns[pattern]:
            del self._patterns[pattern]

    def _fail(self, receives: Iterable[PostedReceive], error: Exception) -> None:
        for receive in receives:
            self._remove(receive)
            receive.error = error


def match_all() -> None:
    """Start the receives of all groups whose messages have arrived; for a thread that waits for something else."""
    _poller.match()


class _Poller:
    """The thread that advances the queues while nobody else does."""

    def __init__(self) -> None:
        self._queues: set[ReceiveQueue] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_asleep = False
        self._is_stopped = False

    def watch(self, queue: ReceiveQueue) -> None:
        """Advance a queue until it is empty."""
        with self._changed:
            self._queues.add(queue)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=runtime.guard_thread(self._run), name="mpidist-receives", daemon=True
                )
                self._thread.start()
                runtime.close_at_exit(self)
            elif self._is_asleep:
                self._changed.notify()

    def match(self) -> bool:
        """Advance all queues once; say whether a message was matched."""
        if not self._queues:
            return False
        has_matched = False
        for queue in tuple(self._queues):
            has_matched = queue.match() or has_matched
        return has_matched

    def close(self, timeout_s: float) -> None:
        """Stop the thread."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        pause_s, last = _SHORTEST_S, time.monotonic()
        while not self._is_stopped:
            time.sleep(pause_s)
            start = time.monotonic()
            pause_s = _SHORTEST_S if self.match() else min(2 * pause_s, _LONGEST_S)
            # Thousands of patterns take longer than a pause, and the threads that post need the
            # queue meanwhile.
            pause_s = max(pause_s, time.monotonic() - start)
            with self._changed:
                self._queues = {queue for queue in self._queues if not queue.is_empty()}
                now = time.monotonic()
                if self._queues:
                    last = now
                elif now - last > _LINGER_S:
                    self._is_asleep = True
                    while not self._queues and not self._is_stopped:
                        self._changed.wait()
                    self._is_asleep = False


_poller = _Poller()
