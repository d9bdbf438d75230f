"""Thread pool of one agent: runs actions, at most so many that may block at once, and lends threads to ``polling``."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from mpidist.comm.mpi import runtime

# Lanes, each with its own limit. A handler may wait for a call of its own, whose completion must not
# wait for a handler to end.
HANDLERS, CALLBACKS = 0, 1


class Action(Protocol):
    """Work that follows from a message.

    Attributes:
        lane: ``HANDLERS``; ``CALLBACKS`` for the completion of a call of this worker.
    """

    lane: int

    @property
    def may_block(self) -> bool:
        """Return whether the action runs users' code."""

    def run(self) -> None:
        """Run the action."""


class Task:
    """An action made of a function."""

    __slots__ = ("may_block", "run")

    lane = HANDLERS

    def __init__(self, run: Callable[[], Any], may_block: bool = True) -> None:
        self.run = run
        self.may_block = may_block


# The action of a message that has been handled already.
HANDLED: Action = Task(lambda: None, False)


class PoolThread:
    """A pool thread's claim to poll.

    Attributes:
        action_number: The number of the action that it runs as the leader; 0 while it polls.
        is_counted: Its action counts among those that run.
        lane: The action's.
    """

    __slots__ = ("action_number", "is_counted", "lane")

    def __init__(self) -> None:
        self.action_number = 0
        self.is_counted = False
        self.lane = HANDLERS


class _Here(threading.local):
    thread: PoolThread | None = None  # None in a user's thread


here = _Here()
_FOLLOW = Task(lambda: None)  # given to a thread that is to follow and lead


class Pool:
    """Threads, made when there is work and none is idle; they live until ``stop``.

    Args:
        limit: The number of actions of each lane that run at once. Those that wait for an answer do
            not count.
        name: For the threads' names.
        follow: The body of a thread that is to follow and lead, with its thread; returns when others
            do.
    """

    def __init__(self, limit: int, name: str, follow: Callable[[PoolThread], None]) -> None:
        self._limit = limit
        self._name = name
        self._follow = follow
        self._lock = threading.Lock()  # guards the next four
        self._running = [0, 0]  # by lane
        # actions beyond the limit
        self._backlog: tuple[deque[Action], deque[Action]] = (deque(), deque())
        self._idle = 0  # threads that wait for the queue, less the items in it
        self._threads: list[threading.Thread] = []
        self._queue: queue.SimpleQueue[Action | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._is_stopping = False

    def submit(self, action: Action) -> None:
        """Have a thread run an action; beyond the limit, when another has ended."""
        lane = action.lane
        with self._lock:
            if self._running[lane] >= self._limit:
                self._backlog[lane].append(action)
                return
            self._running[lane] += 1
        self._enqueue(action)

    def submit_follower(self) -> None:
        """Have a thread follow and lead."""
        self._enqueue(_FOLLOW)

    def is_full(self) -> bool:
        """Say whether as many handlers run as may."""
        return self._running[HANDLERS] >= self._limit

    def enter(self, thread: PoolThread) -> None:
        """Count the action that a thread runs, from now on."""
        with self._lock:
            self._running[thread.lane] += 1
            thread.is_counted = True

    def leave(self, thread: PoolThread) -> None:
        """Count it no more: it has ended, or waits for an answer and must not keep others from running. Again does nothing."""
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
        """Return the number of threads, of those without work, and of actions that wait or run."""
        with self._lock:
            return (
                len(self._threads),
                max(self._idle, 0),
                sum(self._running) + sum(map(len, self._backlog)),
            )

    def stop(self, timeout_s: float, wake: Callable[[], None]) -> bool:
        """Let the threads end; say whether all did. Those in users' code end after it.

        Args:
            wake: Wakes a thread that follows.
        """
        with self._lock:
            self._is_stopping = True  # no thread starts from here on
        deadline = time.monotonic() + timeout_s
        # Again until all have ended: a thread may take another's wake-up.
        while alive := [
            one for one in self._threads if one.is_alive() and one is not threading.current_thread()
        ]:
            for _ in alive:
                wake()
                self._queue.put(None)
            if time.monotonic() > deadline:
                return False
            alive[0].join(min(0.1, timeout_s))
        return True

    def _enqueue(self, action: Action) -> None:
        with self._lock:
            self._idle -= 1
            needs_thread = self._idle < 0
            self._idle += needs_thread
        # By the queue, also to a new thread: a thread keeps the arguments of its body alive until
        # it ends.
        self._queue.put(action)
        if needs_thread:
            self._start_thread()

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
        """Run one action after the other; the body of all threads."""
        thread = here.thread = PoolThread()
        while (action := self._queue.get()) is not None and not self._is_stopping:
            if action is _FOLLOW:
                thread.lane = HANDLERS
                self._follow(thread)
            else:
                thread.lane, thread.is_counted = action.lane, True
                action.run()
            del action  # its arguments end with it, not with the next action
            with self._lock:
                self._idle += 1
            if thread.is_counted:
                self.leave(thread)
