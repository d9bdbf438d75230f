"""Thread that probes for posted receives while no thread waits for them.

The owner of a receive may be in a blocking collective while the sender of a long message is in a
send that ends when the message is matched. The thread ``mpidist-receives`` therefore matches the
posted receives of all groups every few milliseconds.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from mpidist.comm.mpi import agreement_lock, runtime

# Pauses between two rounds of probes; they double while nothing is matched, and go on to grow as a
# share of the time since: a receive that is posted long before its message must not cost a core.
# A queue whose owner posts, sends or waits is left to it for some rounds: the thread would take the
# interpreter's lock from it at every call of MPI, and a window of messages took up to 1.6 times as
# long.
_SHORTEST_S, _LONGEST_S = 5e-4, 2e-3
_SHARE, _LONGEST_IDLE_S = 1 / 16, 8e-3
_ROUNDS_LEFT = 8
# The thread stays awake between the receives of a loop, because waking it costs the posting thread
# tens of microseconds.
_LINGER_S = 0.1


class Queue(Protocol):
    """Posted receives of one group.

    Attributes:
        is_watched: The thread probes for it. Cleared before the thread looks whether the queue is
            empty, so that a receive posted after that look finds it cleared.
        is_in_use: Set by each call of the queue's owner; cleared by the thread.
    """

    is_watched: bool
    is_in_use: bool

    def match(self) -> bool:
        """Start the receives whose messages have arrived; return whether any was started."""

    def is_empty(self) -> bool:
        """Return whether no receive is posted."""


def watch(queue: Queue) -> None:
    """Probe for a queue's receives until the queue is empty."""
    _poller.watch(queue)


def match_all() -> None:
    """Start the receives of all groups whose messages have arrived.

    Called by a thread that waits for another message.
    """
    _poller.match()


class _Poller:
    """The thread and the queues that are not empty."""

    def __init__(self) -> None:
        self._queues: set[Queue] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_asleep = False
        self._is_stopped = False
        self._active_at = 0.0  # a message was matched, or a queue came

    def watch(self, queue: Queue) -> None:
        """Add a queue; start or wake the thread."""
        with self._changed:
            self._queues.add(queue)
            queue.is_watched = True
            self._active_at = time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=runtime.guard_thread(self._run), name="mpidist-receives", daemon=True
                )
                self._thread.start()
                runtime.close_at_exit(self)
            elif self._is_asleep:
                self._changed.notify()

    def match(self) -> bool:
        """Probe once for each queue; return whether a message was matched."""
        if not self._queues:
            return False
        has_matched = False
        # Not tuple(): a garbage collection within it may let another thread add a queue.
        for queue in list(self._queues):
            has_matched = queue.match() or has_matched
        return has_matched

    def close(self, timeout_s: float) -> None:
        """Stop the thread."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _match_unused(self, may_leave: bool) -> bool | None:
        """Probe for the queues whose owners are elsewhere.

        Args:
            may_leave: Queues in use may be left out of this round.

        Returns:
            Whether a message was matched; None if a queue was left out.
        """
        has_matched, has_left = False, False
        for queue in list(self._queues):
            if may_leave and queue.is_in_use:
                queue.is_in_use, has_left = False, True
            else:
                has_matched = queue.match() or has_matched
        return None if has_left else has_matched

    def _run(self) -> None:
        pause_s, last, rounds_left = _SHORTEST_S, time.monotonic(), 0
        while not self._is_stopped:
            time.sleep(pause_s)
            start = time.monotonic()
            with agreement_lock.lock:
                has_matched = self._match_unused(rounds_left < _ROUNDS_LEFT)
            rounds_left = rounds_left + 1 if has_matched is None else 0
            if has_matched is not False:
                self._active_at = start
                pause_s = _LONGEST_S if has_matched is None else 0.0
            pause_s = _next_pause(pause_s, start - self._active_at)
            # Pause at least as long as the probes took: a round over thousands of patterns takes
            # longer than a pause, and threads that post receives need the queue in between.
            pause_s = max(pause_s, time.monotonic() - start)
            with self._changed:
                for queue in tuple(self._queues):
                    queue.is_watched = False
                    if queue.is_empty():
                        self._queues.remove(queue)
                    else:
                        queue.is_watched = True
                now = time.monotonic()
                if self._queues:
                    last = now
                elif now - last > _LINGER_S:
                    self._is_asleep = True
                    while not self._queues and not self._is_stopped:
                        self._changed.wait()
                    self._is_asleep = False


def _next_pause(pause_s: float, idle_s: float) -> float:
    """Return the pause after one of ``pause_s``, 0 where the round has matched a message."""
    longest_s = max(_LONGEST_S, min(idle_s * _SHARE, _LONGEST_IDLE_S))
    return max(_SHORTEST_S, min(2 * pause_s, longest_s))


_poller = _Poller()
