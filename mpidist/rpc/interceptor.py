"""Seam for distributed autograd: hooks on tensors in transit, and message kinds of its own.

``rpc`` knows nothing of autograd. An engine that registers here sees the tensors of every message
that is sent within one of its contexts, and handles its own kinds. Outside a context the hooks cost
one look for it. The context's id is a field of every message, also of those without tensors: a
fetch, an error, the answer to a call of ``remote``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch

from mpidist.rpc.pool import Action

Tensor = torch.Tensor


class Interceptor(Protocol):
    """Distributed autograd, as messages need it."""

    def current_context(self) -> int:
        """Return the id of the calling thread's context; 0 for none."""

    def request_arrived(self, context: int, source: int) -> None:
        """Note that a request's header has arrived within a context: in the order of the messages, on the polling thread."""

    def leaving(self, context: int, to: int, tensors: list[Tensor], is_answer: bool) -> int:
        """Record that a message leaves within a context.

        Args:
            context: Of the sending thread; of an answer, its request's.
            to: The receiver's rank.
            tensors: All tensors of the message, sparse ones and parameters themselves; may be
                empty.
            is_answer: The message answers a request, or is its error.

        Returns:
            A number for the message, below 2⁶⁴, if one of its tensors needs a gradient; else 0.
        """

    def arriving(
        self, context: int, source: int, number: int, tensors: list[Tensor], is_answer: bool
    ) -> list[Tensor]:
        """Return the tensors that take the places of those that arrived in a message with a number."""

    def entering(self, context: int, source: int, is_answer: bool) -> AbstractContextManager[Any]:
        """Return the context manager under which a function of rank ``source``'s request, or a callback, runs."""

    def handle(self, source: int, kind: int, context: int, obj: Any) -> Any:
        """Handle a request of autograd's own kinds; what is returned, or raised, is its answer."""

    def handle_one_way(self, source: int, kind: int, context: int, obj: Any) -> Action | None:
        """Handle a one-way message, on the thread that polls; must not block.

        Args:
            source: The sender's rank.
            kind: Of the message.
            context: In its header; 0 for none.
            obj: What was sent; of gradients the four numbers of ``message.GRADIENTS``, and then
                that.

        Returns:
            What takes longer, to be run now or on another thread; None for nothing.
        """

    def worker_left(self, rank: int) -> None:
        """Note that a worker has left RPC, or died: nothing of it will come any more.

        On the polling thread.
        """

    def stopped(self) -> None:
        """Note that RPC has ended on this worker."""

    def backward(self, context: int, root: Tensor, retain_graph: bool, mode: str) -> None:
        """Run ``RRef.backward`` on the owner."""

    def debug_info(self) -> dict[str, str]:
        """Return counters for ``_get_debug_info``."""


engine: Interceptor | None = None  # read on the path of every message


def register(interceptor: Interceptor | None) -> None:
    """Have all messages of this process pass an engine from now on; None for none."""
    global engine
    engine = interceptor


def load() -> Interceptor:
    """Have the engine of distributed autograd registered, and return it: a request came within a context.

    A worker that serves layers need not import ``mpidist.autograd``: without it, gradients would be
    lost without a word. It is the one name of a higher part that this package knows, and it is
    imported at the first such request.
    """
    global engine
    if engine is None:
        engine = importlib.import_module("mpidist.autograd.api")._engine
    return engine


def current_context() -> int:
    """Return the calling thread's context; 0 for none."""
    return engine.current_context() if engine is not None else 0


def in_current_context(callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the callback so that it runs in the calling thread's context, on any thread."""
    context = current_context()
    return partial(_run_in, context, callback) if context else callback


def _run_in(context: int, callback: Callable[[Any], Any], argument: Any) -> Any:
    if engine is None:
        return callback(argument)
    with engine.entering(context, -1, True):
        return callback(argument)
