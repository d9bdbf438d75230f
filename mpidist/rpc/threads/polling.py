"""Leader/followers: one thread at a time, the leader, polls MPI for messages.

The pattern is Schmidt et al., POSA2, "Leader/Followers". A message that asks for work, and the
answer to a call with a future, become an action (``pool``). **Actions run in threads of the pool
alone** (``_run``): a thread that waits for an answer may hold locks of its user, which the code of
an action takes. The leader is one of:

- **A caller**: a thread that waits for the answer to its own call. It takes the lead from a pool
  thread, polls until its answer arrives, takes up this message alone, and then promotes the next
  waiting caller. It leaves any other message to a pool thread, which takes the lead, and sleeps
  until its call is done; likewise after 3 ms of polling without its answer. Threads that wait for
  anything else (a future, the end of a backward pass) sleep from the beginning.
- **A pool thread**, when no caller leads. It takes up all messages and runs actions itself; a
  request whose function is not known to be quick (``InlinePolicy``) goes back to the pool. Without
  messages it polls for 50 µs without a pause, then yields its core between polls, and after 0.5 ms
  sleeps between polls: at most 3 ms, and 5 ms after a second. It also sleeps while a user's thread
  issues asynchronous calls in quick succession. A thread that waits wakes it (``summon``).

One pool thread is the **follower**. Every 2 ms (a tick) it becomes the leader if there is none, or
if the leader has been in the same action since the last tick, or is a caller that has not polled
since (an exception may have ended its wait anywhere). After eight ticks without messages it sleeps
until the leader runs an action. All other pool threads wait for work.

A signal's handler or a finalizer may call within a poll of its own thread. A caller's poll is
interruptible at each step, so that the thread polls for the inner call; a thread that is taking up
messages for all cannot, and the inner call raises an error at once.

The tick is long because waking a second thread takes the GIL from the first one, which costs it 10
to 50 µs. Measurements: docs/decisions/0008.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from functools import partial
from typing import Protocol

from mpidist.errors import MpidistError
from mpidist.rpc.threads.call import AsyncCall, Call
from mpidist.rpc.threads.pool import HANDLED, Action, Pool, PoolThread, here

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

# The follower: seconds between two checks, and idle ticks before it sleeps without a timeout.
_TICK_S = 2e-3
_IDLE_TICKS = 8

# Tests for a message in one poll. A test costs less than the lock and the frames around it.
_TESTS_PER_POLL = 16

_NEVER = float("inf")

_WITHIN = (
    "a finalizer (or a handler of a signal or of logging) has interrupted the thread that takes up "
    "this worker's messages, and waits for an answer, which could not arrive: call rpc_async or "
    "remote there, and do not wait"
)


class Source(Protocol):
    """Messages of one worker, tested by one thread at a time."""

    def poll(self, tests: int) -> Action | None:
        """Test for a message, at most so many times; return its action, or None for no message."""

    def poll_answer(self, call: Call, tests: int) -> bool | None:
        """Test for a message, and take it up if it answers the call; interruptible.

        Returns whether the call is done; False for a message that needs ``poll``, None for none.
        """

    def is_due(self) -> bool:
        """Return whether ``do_what_is_due`` has something to do."""

    def do_what_is_due(self) -> object:
        """Do what ``poll`` does between messages."""


class Polling:
    """The threads of one agent, of which one at a time polls.

    A thread takes the lead by an assignment to ``leader``, and polls only while it is the leader,
    under the poll lock.

    Args:
        source: The worker's messages.
        threads: The maximum number of actions that may block and run at once. Actions that wait
            for an answer do not count.
        name: A part of the threads' names.

    Attributes:
        pool: The threads that run actions; those that lead and follow are among them.
        leader: A pool thread; or a caller, represented by the call that its thread waits for; None
            if no thread polls.
        parked: Calls of the callers that sleep, and may be promoted.
        is_follower_asleep: The follower sleeps until an action runs or a caller takes the lead.
        is_stopping: Polling ends.
    """

    def __init__(self, source: Source, threads: int, name: str) -> None:
        self.pool = Pool(threads, name, self._follow_and_lead, self._lead)
        self.leader: PoolThread | Call | None = None
        self.parked: deque[Call] = deque()
        self.is_follower_asleep = self.is_stopping = False
        self._source = source
        # Reentrant for calls of signals' handlers and finalizers within a poll.
        self._poll_lock = threading.RLock()
        self._is_taking = False  # its holder is in ``Source.poll``
        self._action_numbers = itertools.count(1)

        # Calls of users' threads.
        self._issued_at = 0.0  # time of the last call
        self._burst_at = 0.0  # time of the last call within a burst

        # What the follower looks at.
        self._caller_terms = 0  # the number of times that a caller has led
        self._caller_polls = 0  # the number of polls of callers
        self._is_idle = False  # the leader is a pool thread without a message for 0.5 ms
        self._following = 0  # threads within ``_follow``
        self._following_lock = threading.Lock()  # for the number
        self._follower_lock = threading.Lock()  # held by the one that follows
        self._wake = threading.Semaphore(0)  # of the follower
        self._nap = threading.Lock()  # held; released to wake the leader
        self._nap.acquire()

    def start(self) -> None:
        """Start the first leader and the first follower."""
        for _ in range(2):
            self.pool.submit_follower()

    def stop(self, timeout_s: float) -> bool:
        """Stop polling; return whether all threads have ended in time.

        Threads in users' code end when that returns.
        """
        self.is_stopping = True
        return self.pool.stop(timeout_s, self._wake.release)

    def await_poll(self) -> None:
        """Wait for the end of a poll that another thread is in."""
        with self._poll_lock:
            pass

    def is_leading(self) -> bool:
        """Return whether the calling thread is a leading pool thread, which must not block long."""
        thread = here.thread
        return thread is not None and thread is self.leader

    # Callers: threads that issue calls, and wait for their answers.

    def note_call(self) -> None:
        """Note that a thread has issued an asynchronous call; during a burst the leader pauses."""
        # Two threads of one process that both poll take the GIL from each other at each poll, which
        # costs more than the calls. A handler does not pause the leader, which serves the others.
        if here.thread is not None:
            return
        now = time.monotonic()
        if now - self._issued_at < _BURST_GAP_S:
            self._burst_at = now
        self._issued_at = now

    def summon(self) -> None:
        """Have a pool thread lead now, without a pause."""
        self._burst_at = 0.0
        if isinstance(self.leader, PoolThread):
            with contextlib.suppress(RuntimeError):  # released by another thread
                self._nap.release()
        else:
            self.pool.submit_leader()

    def wait(self, call: Call) -> None:
        """Wait until a call is done, or its deadline has passed, or polling has stopped.

        Blocks: until one of these; ``call.done`` tells them apart.

        Raises:
            MpidistError: The thread itself is taking up a message: see the module.
        """
        if self._poll_lock._is_owned():  # type: ignore[attr-defined]
            self._poll_within(call)
            return
        thread = here.thread
        action_number = 0
        if thread is not None:
            # A handler that waits must not count as running, or else calls could not nest deeper
            # than the pool has threads; nor must the follower take it for a stuck one.
            action_number, thread.action_number = thread.action_number, 0
            self.pool.leave(thread)

        # Other calls have no answer that their thread could take up.
        call.leads = call.sequence >= 0 and not isinstance(call, AsyncCall)
        if thread is not None and not call.leads and self.leader is thread:
            self.leader = None
        leads_until = _NEVER
        while not call.done:
            if call.leads and not isinstance(self.leader, Call):
                end = self._lead_as_caller(call, thread, leads_until)
                if end is None:
                    break
                leads_until = end
            now = time.monotonic()
            if now >= call.deadline or self.is_stopping:
                break
            call.leads = call.leads and now < leads_until
            if not call.leads and not isinstance(self.leader, Call):
                self.summon()
            call.park(min(call.deadline - now, 1.0), partial(self._offer, call))
            with contextlib.suppress(ValueError):
                self.parked.remove(call)

        if self.parked:
            # This thread may have been promoted at the moment in which its answer arrived.
            self.promote()
        if thread is not None:
            thread.action_number = action_number
            if self.leader is not thread:
                self.pool.enter(thread)

    def _lead_as_caller(
        self, call: Call, thread: PoolThread | None, leads_until: float
    ) -> float | None:
        """Poll until the call is done, the lead is lost, polling stops, or the time is over.

        Args:
            call: Represents the caller.
            thread: The calling thread, if it is the pool's.
            leads_until: The end of the caller's time (``time.monotonic``), which begins with its
                first empty polls; infinite before.

        Returns:
            The end of the caller's time as it is now, 0 if a pool thread must poll; None if the
            call is done.
        """
        was_leading = thread is not None and self.leader is thread
        self.leader = call
        if self.is_follower_asleep:
            self._wake_follower()
        poll_answer, lock, rounds = self._source.poll_answer, self._poll_lock, 0
        try:
            while not call.done:
                with lock:
                    if self.leader is not call or call.done:
                        break
                    self._caller_polls += 1
                    is_answer = poll_answer(call, _TESTS_PER_POLL)
                if is_answer is None:
                    rounds += 1
                    if rounds > _CALLER_SPINS:
                        now = time.monotonic()
                        if leads_until == _NEVER:
                            leads_until = min(now + _CALLER_POLLS_S, call.deadline)
                        if now > leads_until or self.is_stopping:
                            break
                        os.sched_yield()
                elif not is_answer:
                    leads_until = 0.0
                    break
        finally:
            if self.leader is call:
                self.leader = thread if was_leading and call.done else None
                self._caller_terms += 1
            if self.parked:
                self.promote()
        return None if call.done else leads_until

    def _poll_within(self, call: Call) -> None:
        """Wait for a call within a poll of the same thread, which holds the poll lock."""
        if self._is_taking:
            raise MpidistError(_WITHIN)
        while not call.done and not self.is_stopping and time.monotonic() < call.deadline:
            self._caller_polls += 1
            is_answer = self._source.poll_answer(call, _TESTS_PER_POLL)
            if is_answer is None:
                os.sched_yield()
            elif not is_answer and (action := self._take(1)) is not None:
                self._run(action)

    def _take(self, tests: int) -> Action | None:
        """Poll for all; the calling thread holds the poll lock."""
        self._is_taking = True
        try:
            return self._source.poll(tests)
        finally:
            self._is_taking = False

    def _run(self, action: Action) -> None:
        """Run what a message asks for: in the calling thread if this is the pool's leader.

        This decides alone which thread runs an action, and so completes a future.
        """
        me = here.thread
        if action is HANDLED:
            return
        if me is None or self.leader is not me or (action.may_block and self.pool.is_full()):
            self.pool.submit(action)
            return
        # The follower counts the action as running once it finds it stuck: most end before.
        me.action_number = next(self._action_numbers)
        if self.is_follower_asleep:
            self._wake_follower()
        action.run()
        me.action_number = 0
        if me.is_counted:
            self.pool.leave(me)

    def _offer(self, call: Call) -> bool:
        """Offer a thread that will sleep for promotion; return whether it may sleep."""
        self.parked.append(call)
        if self.leader is None and not call.leads:
            self.summon()
        return self.leader is not None or not call.leads

    def promote(self) -> None:
        """Have one parked caller polled for if there is no leader: it need not wait for a tick."""
        parked = self.parked
        while parked and self.leader is None:
            try:
                call = parked.popleft()
            except IndexError:
                return
            if not call.done:
                if call.leads:
                    call.wake()
                else:
                    self.summon()
                return

    # Pool threads.

    def _follow_and_lead(self, me: PoolThread) -> None:
        """Follow, then lead, then follow again; return once two other threads follow."""
        while not self.is_stopping:
            with self._following_lock:
                if self._following >= 2:
                    return
                self._following += 1
            self._follow(me)
            with self._following_lock:
                self._following -= 1
                is_last = self._following == 0
            # One thread must always follow. The previous leader may block in its handler.
            if is_last and not self.is_stopping:
                self.pool.submit_follower()
            self._lead(me)

    def _follow(self, me: PoolThread) -> None:
        """Sleep until there is no leader or the leader is stuck in an action; then take the lead.

        One thread follows at a time; the others wait for its lock.
        """
        with self._follower_lock:
            last_action = idle_ticks = 0
            last_term = last_poll = -1
            while not self.is_stopping:
                time.sleep(_TICK_S)
                leader = self.leader
                if leader is None:
                    # A caller that has led since the last tick probably leads again at once, with
                    # its next call.
                    if self._caller_terms == last_term:
                        self.leader = me
                        return
                    last_term = self._caller_terms
                    continue
                if isinstance(leader, Call):
                    if self._caller_polls == last_poll:
                        self.leader = me
                        return
                    last_poll = self._caller_polls
                    if self._source.is_due():
                        with self._poll_lock:
                            self._source.do_what_is_due()
                    continue
                if leader.action_number != 0 and leader.action_number == last_action:
                    self._count_stuck(leader, last_action)
                    self.leader = me
                    return
                last_action = leader.action_number
                idle_ticks = idle_ticks + 1 if self._is_idle else 0
                if idle_ticks > _IDLE_TICKS:
                    self._sleep_behind(leader)
                    idle_ticks = 0

    def _count_stuck(self, leader: PoolThread, action_number: int) -> None:
        """Count the leader's action among those that run, so that the pool keeps its limit."""
        if not leader.is_counted:
            self.pool.enter(leader)
            # The action may have ended in between, when the thread was not counted.
            if leader.action_number != action_number:
                self.pool.leave(leader)

    def _sleep_behind(self, leader: PoolThread) -> None:
        """Sleep until the leader, if it polls without messages, runs an action."""
        self.is_follower_asleep = True
        # A thread that runs an action or takes the lead records that first, and reads
        # is_follower_asleep afterwards: so one of the two threads sees the other.
        if self.leader is leader and not leader.action_number:
            self._wake.acquire()
        self.is_follower_asleep = False

    def _wake_follower(self) -> None:
        if self.is_follower_asleep:
            # In this order: interrupted in between, the follower is woken once more.
            self._wake.release()
            self.is_follower_asleep = False

    def _lead(self, me: PoolThread) -> None:
        """Take the lead, and poll as a pool thread until it is lost."""
        clock, take, lock = time.monotonic, self._take, self._poll_lock
        self.leader = me
        since, rounds, tests = clock(), 0, _TESTS_PER_POLL
        while self.leader is me and not self.is_stopping:
            if clock() - self._burst_at < _BURST_PAUSE_S:
                self._nap.acquire(timeout=_BURST_PAUSE_S)
                continue
            with lock:
                action = take(tests) if self.leader is me else None
            if action is not None:
                rounds = 0
                tests = _TESTS_PER_POLL
                self._run(action)
                # A traceback that somebody keeps, of an action before it, holds this frame.
                action = None
                continue
            rounds += 1
            if rounds == 1:
                since = clock()
                self._is_idle = False
                continue
            idle = clock() - since
            if idle < _SPIN_S:
                continue
            if idle < _YIELD_S:
                os.sched_yield()
            else:
                self._is_idle = True
                tests = 1
                pause_s = min(idle / 8, _SLEEP_S) if idle < _LONG_IDLE_S else _LONG_SLEEP_S
                if self._nap.acquire(timeout=pause_s):
                    rounds, tests = 0, _TESTS_PER_POLL
        self._is_idle = False
