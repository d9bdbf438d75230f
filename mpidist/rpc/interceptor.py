"""The seam for distributed autograd: what is done to tensors on their way, and the kinds of messages that it adds.

``rpc`` knows nothing of autograd. Whoever registers here sees the tensors of every call and answer, wraps the message in
metadata, and handles message kinds of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

Tensor = torch.Tensor
Outer = tuple[int, tuple[int, ...]]  # an outer kind of ``message.Kind``, and its ids


class Interceptor(Protocol):
    """What distributed autograd does."""

    def leaving(self, to: int, tensors: Sequence[Tensor], answered: Outer | None) -> Outer | None:
        """Record that tensors leave for rank ``to``; return the metadata that wraps the message, or None.

        Args:
            answered: In an answer, what wrapped the request.
        """

    def arriving(self, source: int, outer: Outer, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors that take the places of those that arrived in a wrapped message."""

    def serving(self, source: int, outer: Outer) -> AbstractContextManager[Any]:
        """Return the context in which the function of a wrapped call runs."""

    def handle(self, source: int, kind: int, ids: tuple[int, ...], tensors: Any) -> Any:
        """Handle a request of a kind of autograd's own; what is returned, or raised, is its answer."""

    def backward(self, context_id: int, root: Tensor, retain_graph: bool) -> None:
        """Run ``RRef.backward`` on the owner."""

    def debug_info(self) -> dict[str, str]:
        """Return counters for ``_get_debug_info``."""


_registered: Interceptor | None = None


def register(interceptor: Interceptor | None) -> None:
    """Have all messages of this process pass an interceptor from now on; None for none."""
    global _registered
    _registered = interceptor


def registered() -> Interceptor | None:
    """Return it."""
    return _registered
