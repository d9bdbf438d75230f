"""Leader/followers: one thread at a time polls for messages (Schmidt et al., POSA2, "Leader/Followers").

The leader is the thread that has the **turn**:

- A thread that waits for an answer takes the turn from the pool, polls, and with its answer
  promotes another thread that waits. Requests that arrive meanwhile go to the pool: they may take
  long. After a few milliseconds without its answer it gives up the turn and sleeps.
- Else a thread of the pool. It runs inline what is known to be quick, because waking another thread
  costs more than most handlers take (``inline_policy``); all else goes to the pool. Without
  messages it polls briefly, then yields its core, then naps, up to 3 ms, after a second 5 ms. While
  a user's thread issues calls and looks for answers itself, it naps as well.
- One thread **follows**. Every 2 ms it checks whether nobody has the turn, or the leader has been
  in one handler for a whole tick; then it becomes leader. When no messages come it sleeps without a
  clock until the leader wakes it. All other threads of the pool sleep without one.

Every wake-up of a second thread costs the first one the GIL, and ten to fifty microseconds: hence
the long tick. The measurements behind this are in docs/decisions/0008.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from mpidist.rpc.call import Call
from mpidist.rpc.pool import Action, Pool, Task, Turn, here

TICK_S = 2e-3  # between two looks of the follower
_SPIN_S = 5e-5  # the leader polls so long without a pause, …
_YIELD_S = 5e-4  # … so long with its core yielded in between, …
_NAP_S = 3e-3  # … and then in naps, at most so long, …
# … and so long once it has been idle for so long: an idle worker costs about 1.5 % of a core
_LONG_S, _LONG_NAP_S = 1.0, 5e-3
_WAIT_S = 3e-3  # a thread that waits longer than this for an answer sleeps instead of polling
_BURST_S = 3e-4  # calls that follow each other this closely …
_HELP_S = 2e-3  # … keep the pool's leader from polling for so long
_SPINS = 4  # a thread that waits polls so often without yielding its core
_LOOKS = 16  # of a poll: each costs less than the locks and frames around it
_CALM_TICKS = 8  # after so many looks without a message the follower needs no clock

NOTHING_LEFT: Action = Task(lambda: None, False)  # a message came, and needs no more


class Polling:
    """The threads of one agent.

    Args:
        poll: Looks up to so many times; returns an action, or None if nothing has arrived. Called
            by one thread at a time.
        threads: The number of actions that may block and run at once. Those that wait for an answer
            do not count.
        name: For the threads' names.
    """

    def __init__(self, poll: Callable[[int], Action | None], threads: int, name: str) -> None:
        self.pool = Pool(threads, name, self._serve)
        self._poll = poll
        self._turn: Any = None  # a pool's Turn, or the Call that its thread waits for, or None
        self._poll_lock = threading.Lock()
        self._follower_lock = threading.Lock()
        self._following_lock = threading.Lock()
        self._following = 0  # threads that follow
        self._wake = threading.Semaphore(0)
        self._waits = 0  # threads that waited for an answer have had the turn so often
        self._is_calm = False  # the follower sleeps until it is woken
        self._is_resting = False  # the leader has had no message for a while
        self._issued = 0.0  # when a user's thread has last issued a call
        # … and so soon after the one before that it may be left to poll by itself
        self._helped = 0.0
        self._actions = itertools.count(1)
        self._parked: deque[Call] = deque()  # calls whose threads would poll
        self._is_stopping = False

    def start(self) -> None:
        """Start the two threads that are always there."""
        for _ in range(2):
            self.pool.submit_follower()

    def stop(self, timeout_s: float) -> bool:
        """Stop polling and let the threads end; say whether all did.

        Those in users' code end after it.
        """
        self._is_stopping = True
        return self.pool.stop(timeout_s, self._wake.release)

    def is_leading(self) -> bool:
        """Say whether the calling thread has the turn, and ought not to be kept for long."""
        turn = here.turn
        return turn is not None and turn is self._turn

    def help(self) -> None:
        """Look once, from a user's thread that has just issued a call; while calls follow each other, the leader keeps away."""
        # Two threads of one process that both poll hand the GIL to and fro, which costs more than
        # the calls.
        if here.turn is not None:
            return  # a handler: the leader is needed for the others
        now = time.monotonic()
        if now - self._issued < _BURST_S:
            self._helped = now
        self._issued = now
        if self._poll_lock.acquire(blocking=False):
            try:
                action = self._poll(1)
            finally:
                self._poll_lock.release()
            if action is not None and action is not NOTHING_LEFT:
                if action.may_block:
                    self.pool.submit(action)
                else:
                    action.run()

    def wait(self, call: Call) -> None:
        """Wait until a call is done.

        Blocks: at most until its deadline; whether it is done then is the caller's to ask.
        """
        own = here.turn
        acting = 0
        if own is not None:
            # A handler that waits must not keep others from running (calls may nest deeper than the
            # pool), nor count as stuck.
            acting, own.acting = own.acting, 0
            self.pool.leave(own)
        until = 0.0
        while not call.done:
            before = self._turn
            if before is None or before.is_pools:
                until = self._lead_until_done(call, own, before, until)
                if until < 0:
                    break
            left = call.deadline - time.monotonic()
            if left <= 0 or self._is_stopping:
                break
            may_lead = until == 0.0 or time.monotonic() < until
            call.park(min(left, 1.0), partial(self._offer, call) if may_lead else None)
            if may_lead:
                with contextlib.suppress(ValueError):
                    self._parked.remove(call)
        if self._parked:
            self._promote()  # this thread may have been promoted just as its answer came
        if own is not None:
            own.acting = acting
            if self._turn is not own:
                self.pool.enter(own)

    def _offer(self, call: Call) -> bool:
        """Have a thread promoted that is about to sleep; False: the turn is free, it need not sleep."""
        self._parked.append(call)
        return self._turn is not None

    def _lead_until_done(self, call: Call, own: Turn | None, before: Any, until: float) -> float:
        """Poll until the call is done, the turn is lost, or the time for it is over; return when that is, -1 if done."""
        self._turn = call
        if self._is_calm:
            self._rouse()
        poll, lock, rounds = self._poll, self._poll_lock, 0
        try:
            while not call.done:
                with lock:
                    if self._turn is not call or call.done:
                        break
                    action = poll(_LOOKS)
                if action is None:
                    rounds += 1
                    if rounds > _SPINS:
                        until = until or min(time.monotonic() + _WAIT_S, call.deadline)
                        if time.monotonic() > until or self._is_stopping:
                            break
                        os.sched_yield()
                elif action is not NOTHING_LEFT:
                    if action.may_block:
                        self.pool.submit(action)
                    else:
                        call.acting = next(self._actions)
                        action.run()
                        call.acting = 0
                        # a backward pass is one long wait, full of short actions
                        until, rounds = 0.0, 0
        finally:
            if self._turn is call:
                self._turn = before if before is own and call.done else None
                self._waits += 1
            if self._parked:
                self._promote()
        return -1.0 if call.done else until

    def _promote(self) -> None:
        """Let a thread that waits take the turn, so that none waits for the follower's tick."""
        parked = self._parked
        while parked and self._turn is None:
            try:
                other = parked.popleft()
            except IndexError:
                return
            if not other.done:
                other.wake()
                return

    def _rouse(self) -> None:
        if self._is_calm:
            self._is_calm = False
            self._wake.release()

    # Threads of the pool that lead and follow, in turns.

    def _serve(self, mine: Turn) -> None:
        """Follow and lead, until others follow while this thread is in a handler."""
        while not self._is_stopping:
            with self._following_lock:
                if self._following >= 2:
                    return
                self._following += 1
            self._follow(mine)
            with self._following_lock:
                self._following -= 1
                is_last = self._following == 0
            # The one that followed before may be in a handler, and stay there: there must always be
            # one.
            if is_last and not self._is_stopping:
                self.pool.submit_follower()
            self._lead(mine)

    def _follow(self, mine: Turn) -> None:
        """Sleep until the turn is free, or the leader stuck in a handler; then take it."""
        with self._follower_lock:
            seen = calm = 0
            waits = -1
            while not self._is_stopping:
                time.sleep(TICK_S)
                turn = self._turn
                if turn is None:
                    # A user's thread that makes one call after the other has the turn again in a
                    # moment.
                    if self._waits == waits:
                        self._turn = mine
                        return
                    waits = self._waits
                    continue
                if turn.acting != 0 and turn.acting == seen:
                    if turn.is_pools and not turn.is_counted:
                        self.pool.enter(turn)
                        if turn.acting != seen:
                            # it has ended meanwhile, and found itself not counted
                            self.pool.leave(turn)
                    self._turn = mine
                    return
                seen = turn.acting
                calm = calm + 1 if self._is_resting else 0
                if calm > _CALM_TICKS:
                    self._is_calm = True
                    # A thread that acts, or takes the turn, does so first and looks for a sleeper
                    # then: one of the two sees the other.
                    if self._turn is turn and turn.is_pools and not turn.acting:
                        self._wake.acquire()
                    self._is_calm = False
                    calm = 0

    def _lead(self, mine: Turn) -> None:
        """Poll until the turn is lost."""
        clock, poll, lock = time.monotonic, self._poll, self._poll_lock
        since, rounds, looks = clock(), 0, _LOOKS
        while not self._is_stopping:
            if self._turn is not mine:
                break
            if clock() - self._helped < _HELP_S:
                time.sleep(_HELP_S)
                continue
            with lock:
                action = poll(looks) if self._turn is mine else None
            if action is not None:
                rounds = 0
                looks = _LOOKS
                if action is not NOTHING_LEFT:
                    self._act(mine, action)
                continue
            rounds += 1
            if rounds == 1:
                since = clock()
                self._is_resting = False
                continue
            idle = clock() - since
            if idle < _SPIN_S:
                continue
            if idle < _YIELD_S:
                os.sched_yield()
            else:
                self._is_resting = True
                looks = 1
                time.sleep(min(idle / 8, _NAP_S) if idle < _LONG_S else _LONG_NAP_S)
        self._is_resting = False

    def _act(self, mine: Turn, action: Action) -> None:
        """Run an action in the leader's thread, unless as many run already as may."""
        if action.may_block and self.pool.is_full():
            self.pool.submit(action)
            return
        # Counted only once the follower finds it stuck: most have ended long before.
        mine.acting = next(self._actions)
        if self._is_calm:
            self._rouse()
        action.run()
        mine.acting = 0
        if mine.is_counted:
            self.pool.leave(mine)
