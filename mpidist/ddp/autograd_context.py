"""Interface to distributed autograd: averages of one module in passes that leave ``.grad`` alone.

A pass of distributed autograd takes the leaves' gradients from torch's engine instead of adding
them to ``.grad``, so that the reducer's hooks behind that addition never run. A module whose
forward pass runs within a context joins the context with a ``Reduction``. While a pass runs through
the module's parameters, tensor hooks pass their gradients to the reducer, which launches buckets as
in any other pass. At the end ``finish`` returns the averages; if gradients are reduced to owners,
only this rank's. ``.grad`` is set aside meanwhile.

``mpidist.autograd`` registers itself; this package does not import it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from mpidist.ddp.reducer import Reducer, when_armed
from mpidist.ddp.shadowing import OwnGradients

Tensor = torch.Tensor


def register(join: Callable[[Reduction], None] | None) -> None:
    """Call ``join(reduction)`` after each armed forward pass from now on; None to stop."""
    when_armed(None if join is None else lambda reducer: join(Reduction(reducer)))


class Reduction:
    """One module's part in the passes of a context, one pass at a time.

    Args:
        reducer: The module's reducer, armed.
    """

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self._own_gradients: OwnGradients | None = None
        self._handles: list[RemovableHandle] = []

    def owns(self, leaf: Tensor) -> bool:
        """Return whether ``leaf`` is one of the module's parameters."""
        return leaf in self.reducer.places

    def open(self) -> None:
        """Pass the gradients of the pass that begins to the reducer.

        Raises:
            RuntimeError: Another pass has not ended.
        """
        reducer = self.reducer
        if reducer.captures:
            raise RuntimeError(
                "two passes at once reach the parameters of one DistributedDataParallel module on "
                "this worker: their gradients would be averaged with each other; run one backward "
                "pass after the other"
            )
        reducer.captures = True
        self._own_gradients = reducer.set_aside()
        self._handles = [
            parameter.register_hook(partial(self._mark_ready, place))
            for parameter, place in reducer.places.items()
            if parameter.requires_grad
        ]

    def finish(self) -> list[tuple[Tensor, Tensor]]:
        """Wait for the averages; return (parameter, average), empty if no gradient was passed.

        Collective: over the module's group, if the pass brought any gradient of the module.
        """
        reducer = self.reducer
        try:
            if not reducer.finish_captured():
                return []
            # The next pass overwrites a view of a bucket.
            return [
                (parameter, gradient.clone() if reducer.layout.holds(place, gradient) else gradient)
                for parameter, place in reducer.places.items()
                if (gradient := parameter.grad) is not None
            ]
        finally:
            self.close()

    def close(self) -> None:
        """Restore the parameters' own gradients. A second call does nothing."""
        own, self._own_gradients = self._own_gradients, None
        if own is None:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        try:
            self.reducer.end_captured()
        finally:
            own.restore()

    def _mark_ready(self, place: int, gradient: Tensor) -> None:
        # Runs on the engine's thread with the whole gradient: local passes run the nodes above
        # leaves with hooks one by one.
        if self._own_gradients is not None:
            parameter = self.reducer.parameters[place]
            parameter.grad = gradient.detach()
            self.reducer.mark_ready(place, parameter)
