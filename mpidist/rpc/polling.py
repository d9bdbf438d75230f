"""Leader/followers: one thread at a time, the leader, polls MPI for messages.

The pattern is Schmidt et al., POSA2, "Leader/Followers". A message that asks for work becomes an
action (``pool``); the leader runs it or submits it to the pool. The leader is one of:

- **A caller**: a thread that waits for the answer to a call. It takes the lead from a pool thread,
  polls until its answer arrives, and then promotes the next waiting caller. It submits actions that
  may block to the pool. After 3 ms of polling without its answer it gives up the lead and sleeps.
- **A pool thread**, when no caller leads. It runs actions itself; a request whose function is not
  known to be quick (``inline_policy``) goes back to the pool. Without messages it polls for 50 µs
  without a pause, then yields its core between polls, and after 0.5 ms sleeps between polls: at
  most 3 ms, and 5 ms after a second. It also sleeps while a user's thread issues calls in quick
  succession, because that thread polls once after each call (``poll_once``).

One pool thread is the **follower**. Every 2 ms (a tick) it becomes the leader if there is none, or
if the leader has been in the same action since the last tick. After eight ticks without messages it
sleeps until the leader runs an action. All other pool threads wait for work.

The tick is long because waking a second thread takes the GIL from the first one, which costs it 10
to 50 µs. Measurements: docs/decisions/0008.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable
from functools import partial

from mpidist.rpc.call import Call
from mpidist.rpc.leadership import Leadership
from mpidist.rpc.pool import HANDLED, Action, Pool, PoolThread, here

# A pool thread that leads without messages: polls, then yields its core, then sleeps. The longest
# sleep makes an idle worker use about 1.5 % of a core.
_SPIN_S = 5e-5
_YIELD_S = 5e-4
_SLEEP_S = 3e-3
_LONG_IDLE_S, _LONG_SLEEP_S = 1.0, 5e-3

# A caller that leads: empty polls before it yields its core, and seconds before it sleeps.
_CALLER_SPINS = 4
_CALLER_POLLS_S = 3e-3

# Calls that follow each other within the gap are a burst; after one the pool's leader sleeps.
_BURST_GAP_S = 3e-4
_BURST_PAUSE_S = 2e-3

# Tests for a message in one poll. A test costs less than the lock and the frames around it.
_TESTS_PER_POLL = 16


class Polling:
    """The threads of one agent.

    Args:
        poll: Tests for a message, at most so many times; returns its action, or None if none has
            arrived. Called by one thread at a time.
        threads: The maximum number of actions that may block and run at once. Actions that wait
            for an answer do not count.
        name: A part of the threads' names.
    """

    def __init__(self, poll: Callable[[int], Action | None], threads: int, name: str) -> None:
        self.pool = Pool(threads, name, self._follow_and_lead)
        self._poll = poll
        self.leadership = Leadership(self.pool)
        self._poll_lock = threading.Lock()
        self._following_lock = threading.Lock()
        self._following = 0  # threads within ``follow``
        self._issued_at = 0.0  # time of the last call
        self._burst_at = 0.0  # time of the last call within a burst
        self._action_numbers = itertools.count(1)

    def start(self) -> None:
        """Start the first leader and the first follower."""
        for _ in range(2):
            self.pool.submit_follower()

    def stop(self, timeout_s: float) -> bool:
        """Stop polling; return whether all threads have ended in time.

        Threads in users' code end when that returns.
        """
        return self.leadership.stop(timeout_s)

    def is_leading(self) -> bool:
        """Return whether the calling thread is a leading pool thread, which must not block long."""
        thread = here.thread
        return thread is not None and thread is self.leadership.leader

    def poll_once(self) -> None:
        """Poll once, after a user's thread has issued a call; during a burst the leader pauses."""
        # Two threads of one process that both poll take the GIL from each other at each poll, which
        # costs more than the calls. A handler does not pause the leader, which serves the others.
        if here.thread is not None:
            return
        now = time.monotonic()
        if now - self._issued_at < _BURST_GAP_S:
            self._burst_at = now
        self._issued_at = now
        if self._poll_lock.acquire(blocking=False):
            try:
                action = self._poll(1)
            finally:
                self._poll_lock.release()
            if action is not None and action is not HANDLED:
                if action.may_block:
                    self.pool.submit(action)
                else:
                    action.run()

    def wait(self, call: Call) -> None:
        """Wait until a call is done, or its deadline has passed, or polling has stopped.

        Blocks: until one of these; ``call.done`` tells them apart.
        """
        thread = here.thread
        action_number = 0
        if thread is not None:
            # A handler that waits must not count as running, or else calls could not nest deeper
            # than the pool has threads; nor must the follower take it for a stuck one.
            action_number, thread.action_number = thread.action_number, 0
            self.pool.leave(thread)
        leadership, until = self.leadership, 0.0
        while not call.done:
            leader = leadership.leader
            if not isinstance(leader, Call):
                until = self._lead_until_done(call, thread, leader, until)
                if until < 0:
                    break
            left = call.deadline - time.monotonic()
            if left <= 0 or leadership.is_stopping:
                break
            may_lead = until == 0.0 or time.monotonic() < until
            call.park(min(left, 1.0), partial(leadership.offer, call) if may_lead else None)
            if may_lead:
                with contextlib.suppress(ValueError):
                    leadership.parked.remove(call)
        if leadership.parked:
            # This thread may have been promoted at the moment in which its answer arrived.
            leadership.promote()
        if thread is not None:
            thread.action_number = action_number
            if leadership.leader is not thread:
                self.pool.enter(thread)

    def _lead_until_done(
        self, call: Call, thread: PoolThread | None, previous: PoolThread | None, until: float
    ) -> float:
        """Poll as a caller until the call is done, the lead is lost, or the time limit is reached.

        Args:
            call: Represents the caller.
            thread: The calling thread, if it is the pool's.
            previous: The leader until now.
            until: The time limit (``time.monotonic``); 0 to set it after the first empty polls.

        Returns:
            The time limit, or -1 if the call is done.
        """
        leadership = self.leadership
        leadership.leader = call
        if leadership.is_follower_asleep:
            leadership.wake_follower()
        poll, lock, rounds = self._poll, self._poll_lock, 0
        try:
            while not call.done:
                with lock:
                    if leadership.leader is not call or call.done:
                        break
                    action = poll(_TESTS_PER_POLL)
                if action is None:
                    rounds += 1
                    if rounds > _CALLER_SPINS:
                        until = until or min(time.monotonic() + _CALLER_POLLS_S, call.deadline)
                        if time.monotonic() > until or leadership.is_stopping:
                            break
                        os.sched_yield()
                elif action is not HANDLED:
                    if action.may_block:
                        self.pool.submit(action)
                    else:
                        call.action_number = next(self._action_numbers)
                        action.run()
                        call.action_number = 0
                        # A backward pass is one long wait with many short actions.
                        until, rounds = 0.0, 0
        finally:
            if leadership.leader is call:
                leadership.leader = previous if previous is thread and call.done else None
                leadership.caller_terms += 1
            if leadership.parked:
                leadership.promote()
        return -1.0 if call.done else until

    # Pool threads.

    def _follow_and_lead(self, me: PoolThread) -> None:
        """Follow, then lead, then follow again; return once two other threads follow."""
        while not self.leadership.is_stopping:
            with self._following_lock:
                if self._following >= 2:
                    return
                self._following += 1
            self.leadership.follow(me)
            with self._following_lock:
                self._following -= 1
                is_last = self._following == 0
            # One thread must always follow. The previous leader may block in its handler.
            if is_last and not self.leadership.is_stopping:
                self.pool.submit_follower()
            self._lead(me)

    def _lead(self, me: PoolThread) -> None:
        """Poll as a pool thread until the lead is lost."""
        clock, poll, lock = time.monotonic, self._poll, self._poll_lock
        leadership = self.leadership
        since, rounds, tests = clock(), 0, _TESTS_PER_POLL
        while not leadership.is_stopping:
            if leadership.leader is not me:
                break
            if clock() - self._burst_at < _BURST_PAUSE_S:
                time.sleep(_BURST_PAUSE_S)
                continue
            with lock:
                action = poll(tests) if leadership.leader is me else None
            if action is not None:
                rounds = 0
                tests = _TESTS_PER_POLL
                if action is not HANDLED:
                    self._run_inline(me, action)
                continue
            rounds += 1
            if rounds == 1:
                since = clock()
                leadership.is_idle = False
                continue
            idle = clock() - since
            if idle < _SPIN_S:
                continue
            if idle < _YIELD_S:
                os.sched_yield()
            else:
                leadership.is_idle = True
                tests = 1
                time.sleep(min(idle / 8, _SLEEP_S) if idle < _LONG_IDLE_S else _LONG_SLEEP_S)
        leadership.is_idle = False

    def _run_inline(self, me: PoolThread, action: Action) -> None:
        """Run an action on the leading pool thread; submit it if the pool is full."""
        if action.may_block and self.pool.is_full():
            self.pool.submit(action)
            return
        # The follower counts the action as running once it finds it stuck: most end before.
        me.action_number = next(self._action_numbers)
        if self.leadership.is_follower_asleep:
            self.leadership.wake_follower()
        action.run()
        me.action_number = 0
        if me.is_counted:
            self.pool.leave(me)
