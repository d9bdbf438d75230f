"""Contexts of distributed autograd: which exist on this worker, what each has recorded, and how they end.

A context begins with ``context()`` on one worker, or with the first request that arrives in it,
and is noted as the request's header arrives. MPI keeps the order of a pair of workers, so a
clean-up from the same worker finds all that it is meant for. An answer never makes a context. At
its end each worker passes the clean-up on, once, to all workers to which it has sent requests
within it; while handlers of the context still run here, the last of them does: what they sent goes
ahead. Nothing is confirmed.

When a worker has died, those that know a context from it alone ask the context's own worker to
clean up for it (``Notice.ADOPT``).
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

from mpidist.autograd.control_messages import Notice, notify_all
from mpidist.autograd.dependencies import Plan
from mpidist.autograd.gradients import Gradients
from mpidist.autograd.recording import Node, Receive, Send
from mpidist.ddp import autograd_context
from mpidist.ddp.autograd_context import Captured, Reduction
from mpidist.errors import MpidistError

WORKER_SHIFT = 48
MAX_COUNT = (1 << WORKER_SHIFT) - 1
SMART = 1 << (WORKER_SHIFT - 1)  # in the number of a pass: its mode
MODES = ("fast", "smart")


class Context:
    """One context on one worker.

    Attributes:
        number: Its id; the worker that made it is in the top 16 bits.
        callees: Ranks that requests within the context were sent to, and ranks adopted for clean-up.
        callers: Ranks that requests within the context arrived from.
        sends: By number of the message.
        receives: By node.
        gradients: Of the leaves.
        reductions: Of the data-parallel modules that were run within it, by reducer.
        parts: This worker's parts of backward passes, by pass.
        plans: Plans of passes in SMART mode that were asked for and not begun.
        early: Gradients for passes whose part is not known yet.
        stopped: Passes that have failed.
        completed: Passes whose part here is over.
        active: Handlers that run within it.
        is_released: It has ended here.
        lock: Guards ``active``, ``is_released`` and the making of parts.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.callees: set[int] = set()
        self.callers: set[int] = set()
        self.sends: dict[int, Send] = {}
        self.receives: dict[Node, Receive] = {}
        self.gradients = Gradients()
        self.reductions: dict[Captured, Reduction] = {}
        self.parts: dict[int, Any] = {}
        self.plans: dict[int, Plan] = {}
        self.early: dict[int, list[Any]] = {}
        self.stopped: set[int] = set()
        self.completed: set[int] = set()
        self.active = 0
        self.is_released = False
        self.lock = threading.Lock()

    def peers(self) -> set[int]:
        """Return all workers that it is shared with, as far as this worker knows."""
        return set(self.callees) | set(self.callers)

    # torch's names, read by its tests.

    def _context_id(self) -> int:
        return self.number

    def _send_functions(self) -> dict[int, Send]:
        return dict(self.sends)

    def _recv_functions(self) -> dict[int, Node]:
        return {receive.message: node for node, receive in list(self.receives.items())}

    def _known_worker_ids(self) -> set[int]:
        return set(self.callees)


class _ThreadState(threading.local):
    context: Context | None = None
    waits = False  # the thread waits in ``backward``


thread_state = _ThreadState()


def _join(reduction: Reduction) -> None:
    if thread_state.context is not None:
        thread_state.context.reductions.setdefault(reduction.reducer, reduction)


autograd_context.register(_join)


class Contexts:
    """All contexts of this worker."""

    def __init__(self) -> None:
        self._contexts: dict[int, Context] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._contexts)

    def make_id(self, worker: int) -> int:
        """Return a number that no other worker makes: for contexts, messages and passes."""
        return worker << WORKER_SHIFT | next(self._numbers)

    def create(self, worker: int) -> Context:
        """Make a context of this worker."""
        created = Context(self.make_id(worker))
        self._contexts[created.number] = created
        return created

    def request_arrived(self, me: int, number: int, source: int) -> None:
        """Note a request's context as its header arrives, on the polling thread."""
        found = self._contexts.get(number)
        if found is None:
            if me in (number >> WORKER_SHIFT, source):
                # one of ours, or known when this worker called itself: it has ended since, and
                # nobody would end it again
                return
            found = self._contexts[number] = Context(number)
        found.callers.add(source)

    def find(self, number: int) -> Context | None:
        """Return a context; None if it is not known here, or no more."""
        return self._contexts.get(number)

    def require(self, number: int) -> Context:
        """Return a context.

        Raises:
            MpidistError: It is not known here, or no more.
        """
        found = self._contexts.get(number)
        if found is None:
            raise unknown_context(number)
        return found

    def release(self, number: int, me: int) -> Context | None:
        """End a context here, and on all workers that were told of it here; return it, if it was known."""
        found = self._contexts.pop(number, None)
        if found is not None:
            with found.lock:
                found.is_released = True
                is_last = found.active == 0
            if is_last:
                _send_cleanup(found, me)
        return found

    def worker_left(self, rank: int, me: int) -> list[Context]:
        """End the contexts of a worker that has left, and find others for those known from it alone.

        Returns:
            The contexts that have ended.
        """
        ended = []
        for context in list(self._contexts.values()):
            owner = context.number >> WORKER_SHIFT
            if owner == rank:
                self.release(context.number, me)
                ended.append(context)
            elif rank in context.callers:
                context.callers.discard(rank)
                if not context.callers and owner != me:
                    notify_all([owner], Notice.ADOPT, context.number)
        return ended

    def adopt(self, number: int, worker: int) -> None:
        """Have a worker cleaned up when the context ends; at once if it has."""
        found = self._contexts.get(number)
        if found is not None:
            found.callees.add(worker)
        else:
            notify_all([worker], Notice.CLEANUP, number)

    def values(self) -> list[Context]:
        """Return all."""
        return list(self._contexts.values())

    def clear(self) -> None:
        """Forget all: RPC has ended."""
        for context in self.values():
            context.is_released = True
        self._contexts.clear()


class Within:
    """The context manager under which a handler or a callback runs in a context.

    Args:
        context: None for none.
        me: This worker's rank.
    """

    __slots__ = ("_before", "_context", "_me")

    def __init__(self, context: Context | None, me: int) -> None:
        self._context = context
        self._me = me

    def __enter__(self) -> None:
        """Make it the thread's."""
        self._before = thread_state.context
        thread_state.context = context = self._context
        if context is not None:
            with context.lock:
                context.active += 1

    def __exit__(self, *error: Any) -> None:
        """Give the thread back what it had."""
        thread_state.context = self._before
        context = self._context
        if context is not None:
            with context.lock:
                context.active -= 1
                is_last = context.is_released and context.active == 0
            if is_last:
                _send_cleanup(context, self._me)


def unknown_context(number: int) -> MpidistError:
    """Return the error of a context that is not known here."""
    return MpidistError(f"Could not find autograd context with id: {number}")


def _send_cleanup(context: Context, me: int) -> None:
    # The context's own worker has ended it first. All others get it, also those that told us: we
    # may have told them again.
    notify_all(
        context.callees - {me, context.number >> WORKER_SHIFT}, Notice.CLEANUP, context.number
    )
