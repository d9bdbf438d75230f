"""Flat memory of gradients that are reduced together, with the gradients as views or copies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_not, ne

import torch

from mpidist.comm.algorithms.shared_memory import SharedTensor
from mpidist.comm.memory.stream import used_here
from mpidist.kernels.pack import pack, unpack
from mpidist.kernels.view import laid_out

Tensor = torch.Tensor

_dtype_of = attrgetter("dtype")


class Bucket:
    """Gradients that are reduced together.

    Attributes:
        indices: Places of its parameters in the reducer's list, in the order of ``flat``.
        parameters: The parameters.
        names: Their names in the module.
        flat: N elements, the concatenated gradients.
        node_tensor: ``flat`` of all ranks in memory of the node that they share; else None.
        views: For each parameter its part of ``flat``, in the parameter's shape and, if dense, its
            strides.
        view_of: The views by place.
        copied: Places of the gradients copied into ``flat`` in this pass. A gradient that is a view
            of the bucket is not copied.
        forms: Shape and strides of each view; the same object as long as the bucket lives.
        layout: Layout of its gradients; the reducer refuses a gradient of another layout.
        buffer: Number of its rotating buffer (``owned_bucket``); None for memory of its own.
    """

    layout = torch.strided
    buffer: int | None = None

    def __init__(
        self,
        indices: Sequence[int],
        parameters: Sequence[Tensor],
        names: Sequence[str],
        node_tensor: SharedTensor | None = None,
        flat: Tensor | None = None,
    ) -> None:
        self.indices = tuple(indices)
        self.parameters = [parameters[place] for place in indices]
        self.names = tuple(names[place] for place in indices)
        first = self.parameters[0]
        self.node_tensor = node_tensor
        if node_tensor is not None:
            self.flat = node_tensor.own
        elif flat is not None:
            self.flat = flat
        else:
            self.flat = torch.zeros(
                sum(p.numel() for p in self.parameters), dtype=first.dtype, device=first.device
            )
        self.copied: set[int] = set()
        self.renew_views()
        self.forms = tuple((tuple(view.shape), view.stride()) for view in self.views)
        self._strides = [strides for _, strides in self.forms]

    def renew_views(self) -> None:
        """Make the views again, as tensors of ``flat``'s present memory."""
        self.views: list[Tensor] = []
        start = 0
        for parameter in self.parameters:
            # Autograd adds into a gradient in place only if it has the parameter's strides.
            self.views.append(laid_out(self.flat[start : start + parameter.numel()], parameter))
            start += parameter.numel()
        self.view_of = dict(zip(self.indices, self.views, strict=True))

    def attach_gradients(self) -> None:
        """Make existing gradients views of the bucket, with their values."""
        for place, parameter in zip(self.indices, self.parameters, strict=True):
            self.copy_in(place, parameter, as_view=True)

    def begin_pass(self) -> None:
        """Forget the gradients of the last pass."""
        self.copied.clear()

    def copy_in(self, place: int, parameter: Tensor, as_view: bool) -> bool:
        """Copy one gradient into the bucket unless it is a view; False if there is no dense one."""
        gradient, view = parameter.grad, self.view_of[place]
        if gradient is view:
            return True
        if gradient is None or gradient.layout is not torch.strided:
            return False
        view.copy_(plain(gradient))
        self._after_copy(place, parameter, gradient, as_view)
        return True

    def collect(self, as_views: bool) -> list[tuple[str, torch.layout]]:
        """Copy the gradients that are not in the bucket yet; zeros where there is none.

        Returns:
            Name and layout of each gradient of another layout, in whose place zeros are.
        """
        if self.flat.is_cuda:
            return self._collect_together(as_views)
        refused = []
        for place, name, parameter in zip(self.indices, self.names, self.parameters, strict=True):
            if place not in self.copied and not self.copy_in(place, parameter, as_views):
                self.view_of[place].zero_()
                if parameter.grad is not None:
                    refused.append((name, parameter.grad.layout))
        return refused

    def _collect_together(self, as_views: bool) -> list[tuple[str, torch.layout]]:
        """Do the same in few launches: one if all gradients exist in their parameters' layout."""
        views, sources, found, missing, refused = [], [], [], [], []
        for place, name, view, parameter in zip(
            self.indices, self.names, self.views, self.parameters, strict=True
        ):
            gradient = parameter.grad
            if gradient is view or place in self.copied:
                continue
            if gradient is None or gradient.layout is not torch.strided:
                missing.append(view)
                if gradient is not None:
                    refused.append((name, gradient.layout))
                continue
            views.append(view)
            sources.append(plain(gradient))
            found.append((place, parameter, gradient))
        if missing:
            torch._foreach_zero_(missing)
        self._copy_together(views, sources, is_pack=True)
        self._after_copies(found, as_views)
        return refused

    def _after_copy(self, place: int, parameter: Tensor, gradient: Tensor, as_view: bool) -> None:
        if as_view:
            parameter.grad = self.view_of[place]
        else:
            self.copied.add(place)

    def _after_copies(self, copies: Sequence[tuple[int, Tensor, Tensor]], as_views: bool) -> None:
        # Not recorded in ``copied``: they are copied at the launch, and never again.
        if as_views:
            for place, parameter, _ in copies:
                parameter.grad = self.view_of[place]

    def clear(self) -> None:
        """Fill the bucket with zeros."""
        self.flat.zero_()

    def accept(self, result: Tensor, scale: float) -> None:
        """Copy the result of the reduction, N elements, times ``scale``, into ``flat``."""
        if result.data_ptr() != self.flat.data_ptr():
            self.flat.copy_(used_here(result).view(-1))
        if scale != 1:
            self.flat.mul_(scale)

    def hand_back(self, used: Sequence[bool], as_views: bool) -> None:
        """Copy the reduced bucket into the gradients, or make them views of it.

        Args:
            used: For each place in the reducer's list whether any rank has a gradient; where none
                has, the parameter's gradient stays as it is.
        """
        targets, sources = [], []
        for place, view, parameter in zip(self.indices, self.views, self.parameters, strict=True):
            gradient = parameter.grad
            if gradient is view or not used[place]:
                continue
            if as_views:
                parameter.grad = view
            elif gradient is None:
                parameter.grad = view.clone()
            else:
                targets.append(plain(gradient))
                sources.append(view)
        self._copy_together(sources, targets, is_pack=False)

    def _copy_together(
        self, views: Sequence[Tensor], tensors: Sequence[Tensor], is_pack: bool
    ) -> None:
        """Copy tensors into their views, or back.

        One launch, if the tensors are those of the whole bucket and have the views' strides.
        """
        if not views:
            return
        is_lazy = any(map(Tensor.is_neg, tensors)) or (
            self.flat.dtype.is_complex and any(map(Tensor.is_conj, tensors))
        )
        if len(views) == len(self.views) and not is_lazy and self._are_alike(tensors):
            pack(tensors, self.flat) if is_pack else unpack(self.flat, tensors)
        elif is_pack:
            torch._foreach_copy_(list(views), list(tensors))
        elif is_lazy:
            # Autograd leaves lazily negated or conjugated gradients on complex parameters, and
            # torch._foreach_copy_ does not write such tensors.
            for tensor, view in zip(tensors, views, strict=True):
                tensor.copy_(view)
        else:
            torch._foreach_copy_(list(tensors), list(views))

    def _are_alike(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether tensors, one for each view, have the views' strides and dtype."""
        if any(map(ne, map(Tensor.stride, tensors), self._strides)):
            return False
        return not any(map(is_not, map(_dtype_of, tensors), repeat(self.flat.dtype)))


def plain(gradient: Tensor) -> Tensor:
    """Return a gradient without its autograd history."""
    # Only a pass with create_graph leaves a history. For all other gradients a detach() would cost
    # more than any other call here.
    return gradient.detach() if gradient.requires_grad else gradient
