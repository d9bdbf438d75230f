"""Hooks for distributed autograd: on the tensors in messages, and for message kinds of its own.

``rpc`` does not depend on autograd. An engine that registers here receives the tensors of every
message within one of its contexts, and the messages of its own kinds. Outside a context the hooks
cost one test. The id of the context is a field of every message, also of messages without tensors:
a fetch, an error, the answer to a call of ``remote``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol, TypeVar

import torch

from mpidist.rpc.threads.pool import Action

Tensor = torch.Tensor
A = TypeVar("A")
R = TypeVar("R")


class Interceptor(Protocol):
    """Engine of distributed autograd, as RPC calls it."""

    def current_context(self) -> int:
        """Return the id of the calling thread's context; 0 for none."""

    def request_arrived(self, context: int, source: int) -> None:
        """Record the arrival of a request in a context; on the polling thread, in arrival order."""

    def leaving(self, context: int, to: int, tensors: list[Tensor], is_answer: bool) -> int:
        """Record a message that is sent within a context.

        Args:
            context: The sending thread's; for an answer, its request's.
            to: The receiver's rank.
            tensors: All tensors of the message, including sparse tensors and parameters; may be
                empty.
            is_answer: The message answers a request with a result or an error.

        Returns:
            A number for the message, below 2⁶⁴, if one of its tensors needs a gradient; else 0.
        """

    def arriving(
        self, context: int, source: int, number: int, tensors: list[Tensor], is_answer: bool
    ) -> list[Tensor]:
        """Return replacements for the tensors of a received message that has a number."""

    def entering(self, context: int, source: int, is_answer: bool) -> AbstractContextManager[None]:
        """Return the context manager for the function of a rank's request, or for a callback."""

    def handle(self, source: int, kind: int, context: int, obj: object) -> object:
        """Handle a request of autograd's own kinds; its return value or exception is the answer."""

    def handle_one_way(self, source: int, kind: int, context: int, obj: object) -> Action | None:
        """Handle a one-way message on the polling thread; must not block.

        Args:
            source: The sender's rank.
            kind: The kind of the message.
            context: The context in its header; 0 for none.
            obj: The content; for gradients, the four numbers of ``message.GRADIENTS`` and the
                content.

        Returns:
            An action for work that takes longer, or None.
        """

    def worker_left(self, rank: int) -> None:
        """Record that a worker has left RPC or died; on the polling thread."""

    def stopped(self) -> None:
        """Record that RPC has ended on this worker."""

    def backward(self, context: int, root: Tensor, retain_graph: bool, mode: str) -> None:
        """Run ``RRef.backward`` on the owner."""

    def debug_info(self) -> dict[str, str]:
        """Return counters for ``_get_debug_info``."""


engine: Interceptor | None = None  # read for every message


def register(interceptor: Interceptor | None) -> None:
    """Set the engine for all messages of this process; None for no engine."""
    global engine
    engine = interceptor


def load() -> Interceptor:
    """Return the engine of distributed autograd, and register it if none is registered.

    Called for a request within a context. A worker that serves layers need not import
    ``mpidist.autograd`` itself, and must not lose gradients silently. This is the only name of a
    higher package in ``rpc``; the package is imported at the first such request.
    """
    global engine
    if engine is None:
        engine = importlib.import_module("mpidist.autograd.api")._engine
    return engine


def current_context() -> int:
    """Return the calling thread's context; 0 for none."""
    return engine.current_context() if engine is not None else 0


def in_current_context(callback: Callable[[A], R]) -> Callable[[A], R]:
    """Wrap a callback so that it runs in the calling thread's context, on any thread."""
    context = current_context()
    return partial(_run_in, context, callback) if context else callback


def _run_in(context: int, callback: Callable[[A], R], argument: A) -> R:
    if engine is None:
        return callback(argument)
    with engine.entering(context, -1, True):
        return callback(argument)
