"""A rank's own gradients, set aside while the rank runs passes that must not add to them.

A rank without inputs shadows the collectives of the others (torch's Join); a pass of distributed
autograd leaves ``.grad`` alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpidist.ddp.buckets.accumulated_averages import AccumulatedAverages
from mpidist.ddp.buckets.layout import Layout

Tensor = torch.Tensor

# Set on the parameters meanwhile: a sharded optimizer then uses ``.grad``, the average of the ranks
# with inputs (``mpidist.zero.step.join``).
_IS_SHADOWING = "_mpidist_is_shadowing"


class OwnGradients:
    """Gradients taken away from their parameters, until ``restore``.

    Args:
        averages: Averages that this rank alone holds; None if all ranks hold all.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        layout: Layout,
        averages: AccumulatedAverages | None,
    ) -> None:
        self._parameters = parameters
        self._layout = layout
        self._averages = averages
        self._marks = None if averages is None else averages.set_aside()
        # A gradient, and a copy of its values if it is a view of a bucket, which passes overwrite.
        self._held: list[tuple[Tensor | None, Tensor | None]] = []
        for place, parameter in enumerate(parameters):
            gradient = parameter.grad
            is_view = gradient is not None and gradient.numel() and layout.holds(place, gradient)
            values = gradient.detach().clone() if gradient is not None and is_view else None
            self._held.append((gradient, values))
            parameter.grad = None
            setattr(parameter, _IS_SHADOWING, True)

    def restore(self) -> None:
        """Restore the gradients; those that were views become views of the present buckets."""
        views = self._layout.views
        for place, parameter in enumerate(self._parameters):
            gradient, values = self._held[place]
            parameter.grad = gradient if values is None else views[place].copy_(values)
            delattr(parameter, _IS_SHADOWING)
        if self._averages is not None and self._marks is not None:
            self._averages.restore(self._marks)
