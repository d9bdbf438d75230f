"""The bucket of one parameter whose gradients are sparse (COO): it has no memory of its own, and no view of a gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor


class SparseBucket:
    """One sparse gradient, which travels as its indices and values.

    Attributes:
        indices: The place of its parameter in the reducer's list.
        parameters: The parameter.
        names: Its name in the module.
        layout: The layout of its gradients.
        views: None: a sparse gradient has no fixed memory.
        buffer: None, likewise.
        flat: The gradient, from ``collect`` or ``clear`` to ``hand_back``: a sparse tensor in the
            parameter's shape.
    """

    layout = torch.sparse_coo
    node_tensor = None
    views: Sequence[Tensor] = ()
    buffer: int | None = None

    def __init__(self, place: int, parameter: Tensor, name: str) -> None:
        self.indices = (place,)
        self.parameters = [parameter]
        self.names = (name,)
        self.flat: Tensor = self._empty()

    def attach_gradients(self) -> None:
        """Leave the gradient: it is never a view."""

    def collect(self, as_views: bool) -> list[tuple[str, torch.layout]]:
        """Take the gradient; one without elements for a parameter without.

        Return name and layout of a dense one.
        """
        gradient = self.parameters[0].grad
        fits = gradient is not None and gradient.layout is self.layout
        # Detached, because the reduction replaces indices and values: the parameter's own stay
        # until they are handed back.
        self.flat = gradient.detach() if fits and gradient is not None else self._empty()
        return [] if fits or gradient is None else [(self.names[0], gradient.layout)]

    def clear(self) -> None:
        """Take a gradient without elements."""
        self.flat = self._empty()

    def accept(self, result: Tensor, scale: float) -> None:
        """Multiply the result, which is ``flat``, by ``scale``."""
        if scale != 1:
            self.flat.mul_(scale)

    def hand_back(self, used: Sequence[bool], as_views: bool) -> None:
        """Make the reduced gradient the parameter's, if any rank has one."""
        if used[self.indices[0]]:
            self.parameters[0].grad = self.flat
        self.flat = self._empty()

    def _empty(self) -> Tensor:
        parameter = self.parameters[0]
        return torch.sparse_coo_tensor(
            torch.empty(1, 0, dtype=torch.int64, device=parameter.device),
            parameter.detach().new_empty(0, *parameter.shape[1:]),
            parameter.shape,
            is_coalesced=True,
            check_invariants=False,
        )
