"""Seam for distributed autograd: averages of one module's gradients within passes that leave ``.grad`` alone.

A pass of distributed autograd takes the gradients of leaves from torch's engine instead of adding
them to ``.grad``: the reducer's own hooks, behind that addition, never run. A module whose forward
pass runs within a context joins it with a ``Reduction``. While a pass runs through the module's
parameters, tensor hooks bring their gradients to the reducer, which launches buckets beside the
pass as ever; at the pass's end the averages are handed over: where gradients leave to their owners,
each rank's own. ``.grad`` is put aside meanwhile.

``mpidist.autograd`` registers itself; this package does not know it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

Tensor = torch.Tensor


class Captured(Hashable, Protocol):
    """A reducer, as a pass that captures gradients needs it; see ``Reducer``."""

    captures: bool

    @property
    def parameters(self) -> Sequence[Tensor]:
        """See ``Reducer``."""

    @property
    def places(self) -> Mapping[Tensor, int]:
        """See ``Reducer``."""

    @property
    def views(self) -> Mapping[int, Tensor]:
        """See ``Reducer``."""

    def set_aside(self) -> Any:
        """See ``Reducer``."""

    def restore(self, aside: Any) -> None:
        """See ``Reducer``."""

    def mark_ready(self, place: int, parameter: Tensor) -> None:
        """See ``Reducer``."""

    def finish_captured(self) -> bool:
        """See ``Reducer``."""


_join: Callable[[Reduction], None] | None = None


def register(join: Callable[[Reduction], None] | None) -> None:
    """Have ``join(reduction)`` called after each forward pass whose gradients are to be averaged; None for nobody."""
    global _join
    _join = join


def join(reducer: Captured) -> None:
    """Have the passes of the calling thread's context, if it has one, average a module's gradients."""
    if _join is not None:
        _join(Reduction(reducer))


class Reduction:
    """The part of one module in one pass at a time.

    Args:
        reducer: Of the module; armed.
    """

    def __init__(self, reducer: Captured) -> None:
        self.reducer = reducer
        self._set_aside: Any = None
        self._handles: list[Any] = []

    def owns(self, leaf: Tensor) -> bool:
        """Say whether a leaf's gradient is averaged here."""
        return leaf in self.reducer.places

    def open(self) -> None:
        """Take the gradients of the pass that begins.

        Raises:
            RuntimeError: Another pass has not ended.
        """
        reducer = self.reducer
        if reducer.captures:
            raise RuntimeError(
                "two passes at once reach the parameters of one DistributedDataParallel module on "
                "this worker: their gradients "
                "would be averaged with each other; run one backward pass after the other"
            )
        reducer.captures = True
        self._set_aside = reducer.set_aside()
        self._handles = [
            parameter.register_hook(partial(self._arrived, place))
            for parameter, place in reducer.places.items()
            if parameter.requires_grad
        ]

    def finish(self) -> list[tuple[Tensor, Tensor]]:
        """Wait for the averages, and return them by parameter; nothing if the pass brought no gradient of the module.

        Collective: over the module's group, if it brought any.
        """
        reducer = self.reducer
        try:
            if not reducer.finish_captured():
                return []
            # What is a view of a bucket is overwritten by the next pass.
            return [
                (
                    parameter,
                    gradient.clone() if _is_at(gradient, reducer.views.get(place)) else gradient,
                )
                for parameter, place in reducer.places.items()
                if (gradient := parameter.grad) is not None
            ]
        finally:
            self.close()

    def close(self) -> None:
        """Give the parameters their own gradients back. Again does nothing."""
        aside, self._set_aside = self._set_aside, None
        if aside is None:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.reducer.restore(aside)
        self.reducer.captures = False

    def _arrived(self, place: int, gradient: Tensor) -> None:
        # On the engine's thread, with the whole gradient: nodes above cuts at leaves with hooks are
        # run one by one.
        if self._set_aside is not None:
            parameter = self.reducer.parameters[place]
            parameter.grad = gradient.detach()
            self.reducer.mark_ready(place, parameter)


def _is_at(gradient: Tensor, view: Tensor | None) -> bool:
    return (
        view is not None
        and gradient.layout is torch.strided
        and gradient.data_ptr() == view.data_ptr()
    )
