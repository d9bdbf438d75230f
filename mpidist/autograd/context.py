"""Distributed autograd contexts of this worker: their records and their release.

A worker creates a context in ``context()``, or when the header of the first request within the
context arrives. An answer never creates one. MPI keeps the order of messages between two workers,
so a clean-up message finds every record that the same sender's requests have caused.

At the end of a context each worker sends one clean-up message to every worker that it has sent
requests to within the context. While handlers of the context still run, the last handler sends the
clean-up, so that the handlers' own requests precede the clean-up. No message is confirmed.

When a worker dies, the workers that only it has called within a context ask the context's owner to
send them the clean-up (``Notice.ADOPT``).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

from torch.autograd.graph import Node

from mpidist.autograd.control_messages import Notice, notify_all
from mpidist.autograd.dependencies import Plan
from mpidist.autograd.gradients import Gradients
from mpidist.autograd.recording import Gradient, Receive, Send
from mpidist.ddp import autograd_context
from mpidist.ddp.autograd_context import Reduction
from mpidist.ddp.reducer import Reducer
from mpidist.errors import MpidistError

WORKER_SHIFT = 48
MAX_COUNT = (1 << WORKER_SHIFT) - 1
SMART = 1 << (WORKER_SHIFT - 1)  # bit of a pass's number: SMART mode
MODES = ("fast", "smart")


class _Receives(dict[Node, Receive]):
    """Received messages of one context, by node."""

    def __missing__(self, node: Node) -> NoReturn:
        raise MpidistError(
            "a tensor that was received in another autograd context was used in this one: its "
            "gradient belongs to a message of that context. Use it in its own context, or detach() "
            "it"
        )


class Context:
    """One context on one worker.

    Attributes:
        number: Id of the context; the top 16 bits are the rank of its owner.
        callees: Ranks that were sent requests within the context, and adopted ranks.
        callers: Ranks that requests within the context arrived from.
        sends: Sent messages with tensors that need gradients, by message number.
        receives: Received messages with such tensors, by node.
        gradients: Gradients of the leaves.
        reductions: Data-parallel modules that ran within the context, by reducer.
        parts: This worker's parts of backward passes, by pass.
        plans: Plans of SMART passes that have been surveyed and have not begun.
        early: Gradients that arrived before this worker's part of a SMART pass began.
        stopped: Passes that have failed.
        completed: Passes whose part is complete on this worker.
        active: Number of handlers that run within the context.
        is_released: The context has ended on this worker.
        lock: Guards ``active``, ``is_released`` and the creation of parts.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.callees: set[int] = set()
        self.callers: set[int] = set()
        self.sends: dict[int, Send] = {}
        self.receives: dict[Node, Receive] = _Receives()
        self.gradients = Gradients()
        self.reductions: dict[Reducer, Reduction] = {}
        self.parts: dict[int, Any] = {}
        self.plans: dict[int, Plan] = {}
        self.early: dict[int, list[tuple[int, Sequence[Gradient]]]] = {}
        self.stopped: set[int] = set()
        self.completed: set[int] = set()
        self.active = 0
        self.is_released = False
        self.lock = threading.Lock()

    def peers(self) -> set[int]:
        """Return the ranks that this worker knows to have the context."""
        return set(self.callees) | set(self.callers)

    # torch's names, read by its tests.

    def _context_id(self) -> int:
        return self.number

    def _send_functions(self) -> dict[int, Send]:
        return dict(self.sends)

    def _recv_functions(self) -> dict[int, Node]:
        return {receive.message: node for node, receive in self.receives.copy().items()}

    def _known_worker_ids(self) -> set[int]:
        return set(self.callees)


class _ThreadState(threading.local):
    context: Context | None = None


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
        """Return a number unique in the job, for a context, message or pass."""
        return worker << WORKER_SHIFT | next(self._numbers)

    def create(self, worker: int) -> Context:
        """Create a context that this worker owns."""
        created = Context(self.make_id(worker))
        self._contexts[created.number] = created
        return created

    def request_arrived(self, me: int, number: int, source: int) -> None:
        """Record the context of an arriving request; called on the polling thread."""
        found = self._contexts.get(number)
        if found is None:
            if me in (number >> WORKER_SHIFT, source):
                # This worker has had the context and has released it. A new one would never be
                # released.
                return
            found = self._contexts[number] = Context(number)
        found.callers.add(source)

    def find(self, number: int) -> Context | None:
        """Return a context, or None if this worker does not have it."""
        return self._contexts.get(number)

    def require(self, number: int) -> Context:
        """Return a context.

        Raises:
            MpidistError: This worker does not have it.
        """
        found = self._contexts.get(number)
        if found is None:
            raise unknown_context(number)
        return found

    def release(self, number: int, me: int) -> Context | None:
        """End a context on this worker and its callees; return the context, or None."""
        found = self._contexts.pop(number, None)
        if found is not None:
            with found.lock:
                found.is_released = True
                is_last = found.active == 0
            if is_last:
                _send_cleanup(found, me)
        return found

    def worker_left(self, rank: int, me: int) -> list[Context]:
        """End the contexts of a worker that has left; have others' contexts adopted.

        Returns:
            The ended contexts.
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
        """Add a worker to those that get the clean-up; send it now if the context has ended."""
        found = self._contexts.get(number)
        if found is not None:
            found.callees.add(worker)
        else:
            notify_all([worker], Notice.CLEANUP, number)

    def values(self) -> list[Context]:
        """Return all contexts."""
        return list(self._contexts.values())

    def clear(self) -> None:
        """Drop all contexts, because RPC has ended."""
        for context in self.values():
            context.is_released = True
        self._contexts.clear()


class Within:
    """Context manager that runs a handler or a callback within an autograd context.

    Args:
        context: None for no context.
        me: Rank of this worker.
    """

    __slots__ = ("_before", "_context", "_me")

    def __init__(self, context: Context | None, me: int) -> None:
        self._context = context
        self._me = me

    def __enter__(self) -> None:
        """Set the thread's context."""
        self._before = thread_state.context
        thread_state.context = context = self._context
        if context is not None:
            with context.lock:
                context.active += 1

    def __exit__(self, *error: object) -> None:
        """Restore the thread's previous context."""
        thread_state.context = self._before
        context = self._context
        if context is not None:
            with context.lock:
                context.active -= 1
                is_last = context.is_released and context.active == 0
            if is_last:
                _send_cleanup(context, self._me)


def unknown_context(number: int) -> MpidistError:
    """Return the error for a context that this worker does not have."""
    return MpidistError(f"Could not find autograd context with id: {number}")


def _send_cleanup(context: Context, me: int) -> None:
    # The owner has ended the context first. Callers get the clean-up, too, if this worker has
    # called them in turn.
    notify_all(
        context.callees - {me, context.number >> WORKER_SHIFT}, Notice.CLEANUP, context.number
    )
