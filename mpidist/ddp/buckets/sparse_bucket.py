"""The bucket of one parameter with sparse (COO) gradients: without flat memory or views."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor


class SparseBucket:
    """One sparse gradient, reduced as indices and values.

    Attributes:
        indices: The place of its parameter in the reducer's list.
        parameters: The parameter.
        names: Its name in the module.
        layout: The layout of its gradients.
        views: Empty, because a sparse gradient has no fixed memory.
        copied: Empty, for the same reason.
        buffer: None, for the same reason.
        flat: The gradient from ``collect`` or ``clear`` to ``hand_back``: a sparse tensor of the
            parameter's shape.
    """

    layout = torch.sparse_coo
    node_tensor = None
    views: Sequence[Tensor] = ()
    copied: frozenset[int] = frozenset()
    buffer: int | None = None

    def __init__(self, place: int, parameter: Tensor, name: str) -> None:
        self.indices = (place,)
        self.parameters = [parameter]
        self.names = (name,)
        self.flat: Tensor = self._empty()

    def attach_gradients(self) -> None:
        """Do nothing: a sparse gradient is never a view."""

    def begin_pass(self) -> None:
        """Do nothing: no gradient is copied."""

    def copy_in(self, place: int, parameter: Tensor, as_view: bool) -> bool:
        """Do nothing: ``collect`` refers to the gradient. Return False."""
        return False

    def collect(self, as_views: bool) -> list[tuple[str, torch.layout]]:
        """Refer to the gradient; to one without elements if there is no sparse gradient.

        Returns:
            Name and layout of a dense gradient.
        """
        gradient = self.parameters[0].grad
        fits = gradient is not None and gradient.layout is self.layout
        # Detached, because the reduction replaces indices and values; the parameter keeps its own
        # until ``hand_back``.
        self.flat = gradient.detach() if fits and gradient is not None else self._empty()
        return [] if fits or gradient is None else [(self.names[0], gradient.layout)]

    def clear(self) -> None:
        """Refer to a gradient without elements."""
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
