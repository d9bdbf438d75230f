"""Thread pool of one agent: runs actions, with a limit per lane, and the loop of ``polling``.

Each completion of a call that is submitted runs, since threads may wait for its future: what the
threads have left at the stop, or comes later, runs in the thread that stops the pool or submits it.
Requests are dropped then; their callers are told that this worker leaves.

``InlinePolicy`` knows which actions are too short for a thread of their own.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from mpidist.comm.mpi import runtime

# Lanes, each with its own limit. A handler may wait for a call of its own, and the completion of
# that call must not wait for a handler to end.
HANDLERS, CALLBACKS = 0, 1

# The policy: the time for which an inline request may delay other messages.
QUICK_S = 5e-4
_DECAY = 0.75
_MAX_KEYS = 4096  # a full table is cleared


class Action(Protocol):
    """Work that follows from a message.

    Attributes:
        lane: ``HANDLERS``; ``CALLBACKS`` for the completion of a call of this worker.
    """

    lane: int

    @property
    def may_block(self) -> bool:
        """Return whether the action may take long, and so counts toward the limit of its lane."""

    def run(self) -> object:
        """Run the action."""


class Task:
    """An action that calls a function."""

    __slots__ = ("may_block", "run")

    lane = HANDLERS

    def __init__(self, run: Callable[[], object], may_block: bool = True) -> None:
        self.run = run
        self.may_block = may_block


# The action of a message that has been handled already.
HANDLED: Action = Task(lambda: None, False)


class PoolThread:
    """State of one thread of the pool.

    Attributes:
        action_number: The number of the action that the thread runs as the leader, else 0.
        is_counted: The thread's action counts toward the limit of its lane.
        lane: The lane of the thread's action.
    """

    __slots__ = ("action_number", "is_counted", "lane")

    def __init__(self) -> None:
        self.action_number = 0
        self.is_counted = False
        self.lane = HANDLERS


class _Here(threading.local):
    thread: PoolThread | None = None  # None in a user's thread


here = _Here()
# In the queue: follow and lead; lead at once.
_FOLLOW, _LEAD = Task(lambda: None, False), Task(lambda: None, False)


class Pool:
    """Threads, started when there is work and none is idle; they live until ``stop``.

    Args:
        limit: The maximum number of actions of each lane that run at once. Actions that wait for an
            answer do not count.
        name: A part of the threads' names.
        follow: Follows and leads in the calling thread; returns when enough others do.
        lead: Leads in the calling thread; returns when the lead is lost.
    """

    def __init__(
        self,
        limit: int,
        name: str,
        follow: Callable[[PoolThread], None],
        lead: Callable[[PoolThread], None],
    ) -> None:
        self._limit = limit
        self._name = name
        self._follow = follow
        self._lead = lead
        # Guards the next four. Reentrant: a signal's handler may submit within any call.
        self._lock = threading.RLock()
        self._running = [0, 0]  # by lane
        # Actions beyond the limit, by lane.
        self._backlog: tuple[deque[Action], deque[Action]] = (deque(), deque())
        self._idle = 0  # threads that wait, minus items in the queue
        self._threads: list[threading.Thread] = []
        # Actions, and whether each counts toward the limit.
        self._queue: queue.SimpleQueue[tuple[Action, bool] | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._is_stopping = False

    def submit(self, action: Action) -> None:
        """Run an action on a thread; beyond the limit, once another action has ended."""
        if not action.may_block:
            self._enqueue(action, False)
            return
        lane = action.lane
        with self._lock:
            if self._running[lane] >= self._limit and not self._is_stopping:
                self._backlog[lane].append(action)
                return
            self._running[lane] += 1
        self._enqueue(action)

    def submit_follower(self) -> None:
        """Let a thread follow and lead."""
        self._enqueue(_FOLLOW, False)

    def submit_leader(self) -> None:
        """Let a thread lead at once."""
        self._enqueue(_LEAD, False)

    def is_full(self) -> bool:
        """Return whether the limit of running handlers is reached."""
        return self._running[HANDLERS] >= self._limit

    def enter(self, thread: PoolThread) -> None:
        """Count a thread's action toward the limit."""
        with self._lock:
            self._running[thread.lane] += 1
            thread.is_counted = True

    def leave(self, thread: PoolThread) -> None:
        """Stop counting a thread's action, which has ended or waits for an answer. Idempotent."""
        with self._lock:
            if not thread.is_counted:
                return
            thread.is_counted = False
            backlog, lane = self._backlog[thread.lane], thread.lane
            self._running[lane] -= 1
            if not backlog or self._running[lane] >= self._limit:
                return
            self._running[lane] += 1
            action = backlog.popleft()
        self._enqueue(action)

    def counts(self) -> tuple[int, int, int]:
        """Return the number of threads, of idle threads, and of actions that wait or run."""
        with self._lock:
            return (
                len(self._threads),
                max(self._idle, 0),
                sum(self._running) + sum(map(len, self._backlog)),
            )

    def stop(self, timeout_s: float, wake: Callable[[], None]) -> bool:
        """End the threads, and run the completions that they have left.

        Returns:
            Whether all threads have ended in time.

        Args:
            timeout_s: A thread in users' code may take longer; it ends afterwards.
            wake: Wakes the follower.
        """
        with self._lock:
            self._is_stopping = True  # no thread starts after this
        has_ended = self._join(timeout_s, wake)
        self._run_rest()
        return has_ended

    def _join(self, timeout_s: float, wake: Callable[[], None]) -> bool:
        deadline = time.monotonic() + timeout_s
        # Repeated until all have ended, because a thread may receive another thread's wake-up.
        while alive := [
            thread
            for thread in self._threads
            if thread.is_alive() and thread is not threading.current_thread()
        ]:
            for _ in alive:
                wake()
                self._queue.put(None)
            if time.monotonic() > deadline:
                return False
            alive[0].join(min(0.1, timeout_s))
        return True

    def _enqueue(self, action: Action, is_counted: bool = True) -> None:
        with self._lock:
            self._idle -= 1
            needs_thread = self._idle < 0
            self._idle += needs_thread
        # A new thread gets its action from the queue, not as an argument: a Thread object keeps
        # its arguments alive until it ends.
        self._queue.put((action, is_counted))
        if needs_thread:
            self._start_thread()
        # Behind the put: so this thread or the one that stops the pool sees the action.
        if self._is_stopping:
            self._run_rest()

    def _run_rest(self) -> None:
        """Run the completions that no thread takes any more; drop the requests."""
        with self._lock:
            rest = [*self._backlog[CALLBACKS]]
            for backlog in self._backlog:
                backlog.clear()
        ends = 0  # of threads in users' code, which end by them later
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                if item is None:
                    ends += 1
                elif item[0].lane == CALLBACKS:
                    rest.append(item[0])
        for _ in range(ends):
            self._queue.put(None)
        for action in rest:
            action.run()

    def _start_thread(self) -> None:
        name = f"mpidist-{self._name}-{next(self._numbers)}"
        thread = threading.Thread(
            target=runtime.guard_thread(self._run_actions), name=name, daemon=True
        )
        with self._lock:
            if not self._is_stopping:
                self._threads.append(thread)
                thread.start()

    def _run_actions(self) -> None:
        """Run one action after the other: the body of each thread."""
        thread = here.thread = PoolThread()
        while (item := self._queue.get()) is not None and not self._is_stopping:
            action, thread.is_counted = item
            thread.lane = action.lane
            if action is _FOLLOW:
                self._follow(thread)
            elif action is _LEAD:
                self._lead(thread)
            else:
                action.run()
            # The arguments of the action would live until the next action.
            del action, item
            with self._lock:
                self._idle += 1
            if thread.is_counted:
                self.leave(thread)
        if item is not None:
            self._queue.put(item)
            self._run_rest()


class InlinePolicy:
    """Running times in seconds, by function, to decide which requests the polling thread runs.

    Not locked: a race loses one measurement.
    """

    def __init__(self) -> None:
        self._seconds: dict[object, float] = {}

    def is_quick(self, key: object) -> bool:
        """Return whether a function has run, and recently took less than ``QUICK_S``."""
        return self._seconds.get(key, QUICK_S) < QUICK_S

    def record(self, key: object, seconds: float) -> None:
        """Record the running time of one run.

        A long run takes effect at once; its effect decays with short runs.
        """
        before = self._seconds.get(key)
        if before is None:
            if len(self._seconds) >= _MAX_KEYS:
                self._seconds.clear()
            self._seconds[key] = seconds
        elif seconds > before or before > QUICK_S / 10:
            self._seconds[key] = max(seconds, _DECAY * before + (1 - _DECAY) * seconds)
