"""The lead among the threads of one agent: leader, follower, parked callers (see ``polling``)."""

from __future__ import annotations

import threading
import time
from collections import deque

from mpidist.rpc.call import Call
from mpidist.rpc.pool import Pool, PoolThread

TICK_S = 2e-3  # between two checks by the follower
_IDLE_TICKS = 8  # before the follower sleeps without a timeout


class Leadership:
    """The lead, and the threads that may take it.

    A thread takes the lead by an assignment to ``leader``, and polls only while it is the leader,
    under the poll lock of ``Polling``.

    Attributes:
        leader: A pool thread; or a caller, represented by the call that its thread waits for; None
            if no thread polls.
        parked: Calls of the callers that sleep, and may be promoted.
        caller_terms: The number of times that a caller has led.
        is_idle: The leader is a pool thread that has had no message for 0.5 ms.
        is_follower_asleep: The follower sleeps until ``wake_follower``.
        is_stopping: Polling ends.
    """

    def __init__(self, pool: Pool) -> None:
        self.leader: PoolThread | Call | None = None
        self.parked: deque[Call] = deque()
        self.caller_terms = 0
        self.is_idle = self.is_follower_asleep = self.is_stopping = False
        self._pool = pool
        self._follower_lock = threading.Lock()
        self._wake = threading.Semaphore(0)

    def offer(self, call: Call) -> bool:
        """Offer the calling thread, which will sleep, for promotion; return if a leader exists."""
        self.parked.append(call)
        return self.leader is not None

    def promote(self) -> None:
        """Wake one parked caller if there is no leader, so that it need not wait for a tick."""
        parked = self.parked
        while parked and self.leader is None:
            try:
                call = parked.popleft()
            except IndexError:
                return
            if not call.done:
                call.wake()
                return

    def wake_follower(self) -> None:
        """Wake the follower if it sleeps without a timeout."""
        if self.is_follower_asleep:
            self.is_follower_asleep = False
            self._wake.release()

    def stop(self, timeout_s: float) -> bool:
        """End the threads of the pool; return whether all have ended in time."""
        self.is_stopping = True
        return self._pool.stop(timeout_s, self._wake.release)

    def follow(self, me: PoolThread) -> None:
        """Sleep until there is no leader or the leader is stuck in an action; then take the lead.

        One thread follows at a time; the others wait for its lock.
        """
        with self._follower_lock:
            last_action = idle_ticks = 0
            last_term = -1
            while not self.is_stopping:
                time.sleep(TICK_S)
                leader = self.leader
                if leader is None:
                    # A caller that has led since the last tick probably leads again at once, with
                    # its next call.
                    if self.caller_terms == last_term:
                        self.leader = me
                        return
                    last_term = self.caller_terms
                    continue
                if leader.action_number != 0 and leader.action_number == last_action:
                    self._count_stuck(leader, last_action)
                    self.leader = me
                    return
                last_action = leader.action_number
                idle_ticks = idle_ticks + 1 if self.is_idle else 0
                if idle_ticks > _IDLE_TICKS:
                    self._sleep_behind(leader)
                    idle_ticks = 0

    def _count_stuck(self, leader: PoolThread | Call, action_number: int) -> None:
        """Count the leader's action among those that run, so that the pool keeps its limit."""
        if isinstance(leader, PoolThread) and not leader.is_counted:
            self._pool.enter(leader)
            # The action may have ended in between, when the thread was not counted.
            if leader.action_number != action_number:
                self._pool.leave(leader)

    def _sleep_behind(self, leader: PoolThread | Call) -> None:
        self.is_follower_asleep = True
        # A thread that runs an action or takes the lead records that first, and reads
        # is_follower_asleep afterwards: so one of the two threads sees the other.
        is_polling = isinstance(leader, PoolThread) and not leader.action_number
        if self.leader is leader and is_polling:
            self._wake.acquire()
        self.is_follower_asleep = False
