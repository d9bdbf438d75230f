"""Threads that poll for messages, and the pool that runs what those ask for.

One thread at a time has the **turn** and polls:

- A thread that waits for an answer takes it, polls for itself, and gives it back with its answer. Requests that come meanwhile go
  to the pool: they may take long. A wait longer than a few milliseconds gives the turn back and sleeps.
- Else a thread of the pool, the *leader*. What is known to be quick it runs by itself, because waking another thread costs more
  than most handlers take (``quickness``); the rest goes to the pool. Without messages it polls briefly, then yields its core,
  then sleeps in naps that grow to 2.5 ms. While a user's thread issues calls and looks for answers itself, it sleeps as well.
- Beside the leader one thread *stands by*. While messages come it looks once in a tick whether the turn is free, or the leader
  is still in the handler of its last look, and then takes the turn: what blocks against all experience holds up the polling for
  two ticks at most. When nothing comes, it sleeps without a clock until the leader wakes it. All other threads sleep without one.

Every wake-up of a second thread costs the first one Python's lock, and ten to fifty microseconds: hence the long tick.
The measurements behind this are in docs/decisions/0008.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from mpidist.comm import runtime
from mpidist.rpc.call import Call

TICK_S = 2e-3  # how often the thread that stands by looks
_SPIN_S = 5e-5  # the leader polls so long without a pause, …
_YIELD_S = 5e-4  # … so long with its core given away in between, …
_NAP_S = 2.5e-3  # … and then in naps, at most so long: an idle worker costs between 1 and 2 % of a core
_WAIT_S = 3e-3  # a thread that waits longer than this for an answer sleeps instead of polling
_BURST_S = 3e-4  # calls that follow each other this closely …
_HELP_S = 2e-3  # … keep the leader from polling for so long
_SPINS = 20  # a thread that waits polls so often without giving its core away
_CALM_TICKS = 8  # after so many looks without a message the thread that stands by needs no clock


class Action:
    """What a message asks for.

    Attributes:
        run: Does it.
        may_block: It runs users' code.
    """

    __slots__ = ("may_block", "run")

    def __init__(self, run: Callable[[], None], may_block: bool) -> None:
        self.run = run
        self.may_block = may_block


NOTHING_LEFT = Action(lambda: None, False)  # a message came, and needs no more
_STAND_BY = Action(lambda: None, False)  # what a thread is given that is to stand by and lead


class _Turn:
    """A thread's claim to the turn.

    Attributes:
        acting: The number of the action it is running; 0 while it polls.
        is_pools: It is a thread of the pool, which anybody who waits may take the turn from.
    """

    __slots__ = ("acting", "is_pools")

    def __init__(self, is_pools: bool) -> None:
        self.acting = 0
        self.is_pools = is_pools


class _Here(threading.local):
    turn: _Turn | None = None  # of a thread of the pool


_here = _Here()


class Polling:
    """The threads of one agent.

    Args:
        poll: Looks once; returns an Action, or None if nothing has come. Called by one thread at a time.
        threads: How many actions that may block run at once. Those that wait for an answer do not count.
        name: For the threads' names.
    """

    def __init__(self, poll: Callable[[], Action | None], threads: int, name: str) -> None:
        self._poll = poll
        self._limit = threads
        self._name = name
        self._turn: Any = None  # a _Turn, or None; other threads set it, too
        self._turn_lock = threading.Lock()
        self._poll_lock = threading.Lock()
        self._standby_lock = threading.Lock()
        self._wake = threading.Semaphore(0)
        self._is_calm = False  # the thread that stands by sleeps until it is woken
        self._is_resting = False  # the leader has had no message for a while
        self._issued = 0.0  # when a user's thread has last issued a call
        self._helped = 0.0  # … and so soon after the one before that it may be left to poll by itself
        self._actions = itertools.count(1)
        self._count_lock = threading.Lock()  # guards the next five
        self._running = 0  # actions that may block and do not wait for an answer
        self._backlog: deque[Action] = deque()  # those that have to wait for others to end
        self._idle = 0  # threads that wait for the queue and that nothing was put there for
        self._standing = 0  # threads that stand by
        self._queue: queue.SimpleQueue[Action | None] = queue.SimpleQueue()  # one item for each thread that is not idle any more
        self._threads: list[threading.Thread] = []
        self._stopping = False
        self._numbers = itertools.count()

    def start(self) -> None:
        """Start the two threads that are always there."""
        for _ in range(2):
            self._start_thread(_STAND_BY)

    def stop(self, timeout_s: float) -> bool:
        """Stop polling and let the threads end; say whether all did. Those in users' code end after it."""
        self._stopping = True
        deadline = time.monotonic() + timeout_s
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        # Again until all have ended: a thread may take another's wake-up, or start after this one looked.
        while alive := [thread for thread in others if thread.is_alive()]:
            for _ in alive:
                self._wake.release()
                self._queue.put(None)
            if time.monotonic() > deadline:
                return False
            alive[0].join(min(0.1, timeout_s))
            others = [thread for thread in self._threads if thread is not threading.current_thread()]
        return True

    def counts(self) -> tuple[int, int, int]:
        """Return the number of threads, of those without work, and of actions queued or running."""
        with self._count_lock:
            return len(self._threads), self._idle, self._running + len(self._backlog)

    def is_leading(self) -> bool:
        """Say whether the calling thread has the turn, and ought not to be kept for long."""
        turn = _here.turn
        return turn is not None and turn is self._turn

    def submit(self, run: Callable[[], None]) -> None:
        """Have a thread of the pool do something that may block."""
        self._enqueue(Action(run, True))

    def help(self) -> None:
        """Look once, from a user's thread that has just issued a call; while calls follow each other, the leader keeps away.

        Two threads of one process that both poll hand Python's lock to and fro, which costs more than the calls.
        """
        if _here.turn is not None:
            return  # a handler: the leader is needed for the others
        now = time.monotonic()
        if now - self._issued < _BURST_S:
            self._helped = now
        self._issued = now
        if self._poll_lock.acquire(blocking=False):
            try:
                action = self._poll()
            finally:
                self._poll_lock.release()
            if action is not None and action is not NOTHING_LEFT:
                if action.may_block:
                    self._enqueue(action)
                else:
                    action.run()

    def wait(self, call: Call, deadline: float) -> None:
        """Wait until a call is done.

        Blocks: at most until ``deadline`` (``time.monotonic``); whether it is done then is the caller's to ask.
        """
        own = _here.turn
        if own is None:
            self._wait(call, deadline, None)
            return
        self._step_aside()
        try:
            self._wait(call, deadline, own)
        finally:
            self._come_back()

    def _wait(self, call: Call, deadline: float, own: _Turn | None) -> None:
        if self._wait_with_turn(call, deadline, own):
            return
        while not call.done and (left := deadline - time.monotonic()) > 0 and not self._stopping:
            call.park(min(left, 1.0))

    def _wait_with_turn(self, call: Call, deadline: float, own: _Turn | None) -> bool:
        """Poll for a while; say whether the call is done."""
        mine = _Turn(False)
        with self._turn_lock:
            before = self._turn
            if before is not None and not before.is_pools:
                return False  # another thread waits, and polls for both
            self._turn = mine
        self._rouse()
        clock = time.monotonic
        until = min(clock() + _WAIT_S, deadline)
        poll, lock, rounds = self._poll, self._poll_lock, 0
        try:
            while not call.done:
                with lock:
                    if self._turn is not mine or call.done:
                        return call.done
                    action = poll()
                if action is not None:
                    if action is not NOTHING_LEFT:
                        self._hand_on(action, mine)
                    continue
                rounds += 1
                if rounds > _SPINS:
                    if clock() > until:
                        return False
                    os.sched_yield()
            return True
        finally:
            with self._turn_lock:
                if self._turn is mine:
                    self._turn = before if before is own else None

    def _hand_on(self, action: Action, mine: _Turn) -> None:
        if action.may_block:
            self._enqueue(action)
        else:
            mine.acting = next(self._actions)
            action.run()
            mine.acting = 0

    def _rouse(self) -> None:
        if self._is_calm:
            self._is_calm = False
            self._wake.release()

    # The pool. An action counts as running from when a thread was found for it.

    def _step_aside(self) -> None:
        # A handler that waits for an answer must not keep others from running: calls may nest deeper than the pool.
        with self._count_lock:
            self._running -= 1
            action = self._next()
        if action is not None:
            self._give(action)

    def _come_back(self) -> None:
        with self._count_lock:
            self._running += 1

    def _enqueue(self, action: Action) -> None:
        with self._count_lock:
            if self._running >= self._limit:
                self._backlog.append(action)
                return
            self._running += 1
        self._give(action)

    def _next(self) -> Action | None:
        """Return an action that may run now, if there is one; called with the lock."""
        if not self._backlog or self._running >= self._limit:
            return None
        self._running += 1
        return self._backlog.popleft()

    def _give(self, action: Action) -> None:
        """Hand an action to a thread without work, or to a new one."""
        with self._count_lock:
            is_new = self._idle == 0
            self._idle -= not is_new
        if is_new:
            self._start_thread(action)
        else:
            self._queue.put(action)

    def _start_thread(self, first: Action) -> None:
        if self._stopping:
            return
        name = f"mpidist-{self._name}-{next(self._numbers)}"
        thread = threading.Thread(target=runtime.guard_thread(self._live), args=(first,), name=name, daemon=True)
        with self._count_lock:
            self._threads = [other for other in self._threads if other.is_alive() or other.ident is None]
            self._threads.append(thread)
        thread.start()

    def _live(self, first: Action) -> None:
        """Do one thing after the other; the body of all threads."""
        mine = _here.turn = _Turn(True)
        action: Action | None = first
        while action is not None and not self._stopping:
            is_ours = action is _STAND_BY
            if is_ours:
                self._serve(mine)
            else:
                action.run()
            with self._count_lock:
                self._running -= not is_ours
                action = self._next()
                self._idle += action is None
            if action is None:
                action = self._queue.get()

    # Threads that lead and stand by, in turns.

    def _serve(self, mine: _Turn) -> None:
        """Stand by and lead, until others stand by while this thread is in a handler."""
        while not self._stopping:
            with self._count_lock:
                if self._standing >= 2:
                    return
                self._standing += 1
            self._stand_by(mine)
            with self._count_lock:
                self._standing -= 1
                is_last = self._standing == 0
            # Whoever stood by before may be in a handler, and stay there: there must always be one.
            if is_last and not self._stopping:
                self._give(_STAND_BY)
            self._lead(mine)

    def _stand_by(self, mine: _Turn) -> None:
        """Sleep until the turn is free, or its thread stuck in a handler; then take it."""
        with self._standby_lock:
            seen = calm = 0
            while not self._stopping:
                time.sleep(TICK_S)
                with self._turn_lock:
                    turn = self._turn
                    is_stuck = turn is not None and turn.acting != 0 and turn.acting == seen
                    if turn is None or is_stuck:
                        self._turn = mine
                        return
                seen = turn.acting
                calm = calm + 1 if self._is_resting else 0
                if calm > _CALM_TICKS:
                    self._is_calm = True
                    # Whoever acts, or takes the turn, says so first and looks for a sleeper then: one of the two sees the other.
                    if self._turn is turn and turn.is_pools and not turn.acting:
                        self._wake.acquire()
                    self._is_calm = False
                    calm = 0

    def _lead(self, mine: _Turn) -> None:
        """Poll until the turn is lost."""
        clock, poll, lock = time.monotonic, self._poll, self._poll_lock
        since, rounds = clock(), 0
        while not self._stopping:
            if self._turn is not mine:
                break
            if clock() - self._helped < _HELP_S:
                time.sleep(_HELP_S)
                continue
            with lock:
                action = poll() if self._turn is mine else None
            if action is not None:
                rounds = 0
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
                time.sleep(min(idle / 8, _NAP_S))
        self._is_resting = False

    def _act(self, mine: _Turn, action: Action) -> None:
        """Run an action in the leader's thread, unless as many run already as may."""
        if action.may_block:
            with self._count_lock:
                if self._running >= self._limit:
                    self._backlog.append(action)
                    return
                self._running += 1
        mine.acting = next(self._actions)
        self._rouse()
        action.run()
        mine.acting = 0
        if action.may_block:
            with self._count_lock:
                self._running -= 1
                following = self._next()
            if following is not None:
                self._give(following)
