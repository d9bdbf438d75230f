"""A bucket's flat memory with the gradients as views of it, and what a communication hook sees of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_not, ne
from typing import Any

import torch

from mpidist.comm.algorithms.shared_memory import NodeTensor
from mpidist.comm.memory.stream import used_here
from mpidist.kernels.pack import pack, unpack
from mpidist.kernels.view import laid_out

Tensor = torch.Tensor

_dtype_of = attrgetter("dtype")


class Bucket:
    """Gradients that travel together.

    Attributes:
        indices: Places of its parameters in the reducer's list, in the order in which they lie in
            ``flat``.
        parameters: The parameters.
        names: Their names in the module.
        flat: N elements, the gradients one behind the other.
        node_tensor: ``flat`` of all ranks, where they share a node's memory; else None.
        views: For each parameter its part of ``flat``, in the parameter's shape and, where that is
            dense, its strides.
        forms: For each view its shape and strides, which stay as they are.
        layout: The layout of its gradients. One of another layout counts as none: the reducer has
            refused it.
        buffer: The number of the buffer in which it takes turns with others (``owned_bucket``);
            None for memory of its own.
    """

    layout = torch.strided
    buffer: int | None = None

    def __init__(
        self,
        indices: Sequence[int],
        parameters: Sequence[Tensor],
        names: Sequence[str],
        node_tensor: NodeTensor | None = None,
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
        self.renew_views()
        self.forms = tuple((tuple(view.shape), view.stride()) for view in self.views)
        self._strides = [strides for _, strides in self.forms]

    def renew_views(self) -> None:
        """Make the views anew."""
        self.views: list[Tensor] = []
        start = 0
        for parameter in self.parameters:
            # Autograd adds into a gradient without a copy only if it is laid out as the parameter
            # is.
            self.views.append(laid_out(self.flat[start : start + parameter.numel()], parameter))
            start += parameter.numel()

    def attach_gradients(self) -> None:
        """Make the gradients that exist views of the bucket, with their values."""
        for view, parameter in zip(self.views, self.parameters, strict=True):
            take(parameter, view, as_view=True)

    def collect(self, as_views: bool) -> list[tuple[str, torch.layout]]:
        """Bring the gradients into the bucket, those that are not there already; zeros for a parameter without.

        Returns:
            Name and layout of each gradient that has another layout; it counts as none.
        """
        if self.flat.is_cuda:
            return self._collect_together(as_views)
        refused = []
        for name, view, parameter in zip(self.names, self.views, self.parameters, strict=True):
            if not take(parameter, view, as_views):
                view.zero_()
                if parameter.grad is not None:
                    refused.append((name, parameter.grad.layout))
        return refused

    def _collect_together(self, as_views: bool) -> list[tuple[str, torch.layout]]:
        """Do the same in as few launches as possible: one, if every gradient is there and in its parameter's layout."""
        views, gradients, parameters, missing, refused = [], [], [], [], []
        for name, view, parameter in zip(self.names, self.views, self.parameters, strict=True):
            gradient = parameter.grad
            if gradient is view:
                continue
            if gradient is None or gradient.layout is not torch.strided:
                missing.append(view)
                if gradient is not None:
                    refused.append((name, gradient.layout))
                continue
            views.append(view)
            gradients.append(plain(gradient))
            parameters.append(parameter)
        if missing:
            torch._foreach_zero_(missing)
        self._copy_together(views, gradients, is_pack=True)
        if as_views:
            for view, parameter in zip(views, parameters, strict=True):
                parameter.grad = view
        return refused

    def clear(self) -> None:
        """Fill it with zeros."""
        self.flat.zero_()

    def accept(self, result: Tensor, scale: float) -> None:
        """Bring the result of its reduction, times ``scale``, into ``flat``.

        Raises:
            ValueError: Another number of elements.
        """
        if result.numel() != self.flat.numel():
            raise ValueError(
                f"a communication hook must return {self.flat.numel()} elements; got shape "
                f"{tuple(result.shape)}"
            )
        if result.data_ptr() != self.flat.data_ptr():
            self.flat.copy_(used_here(result).view(-1))
        if scale != 1:
            self.flat.mul_(scale)

    def hand_back(self, used: Sequence[bool], as_views: bool) -> None:
        """Bring the reduced bucket into the gradients.

        Args:
            used: For each place in the reducer's list, whether any rank has a gradient; without, it
                stays as it is.
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
        """Copy tensors into their views, or back; one launch if they are all of the bucket and laid out as the views are."""
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
            # Autograd leaves such gradients for complex parameters, and torch writes no list that
            # holds one.
            for tensor, view in zip(tensors, views, strict=True):
                tensor.copy_(view)
        else:
            torch._foreach_copy_(list(tensors), list(views))

    def _are_alike(self, tensors: Sequence[Tensor]) -> bool:
        """Say whether tensors, one for each view, are laid out as the views are, and of their dtype."""
        if any(map(ne, map(Tensor.stride, tensors), self._strides)):
            return False
        return not any(map(is_not, map(_dtype_of, tensors), repeat(self.flat.dtype)))


def take(parameter: Tensor, view: Tensor, as_view: bool) -> bool:
    """Bring one gradient into its bucket, if it is not there already; return False if there is none, or none that is dense."""
    gradient = parameter.grad
    if gradient is view:
        return True
    if gradient is None or gradient.layout is not torch.strided:
        return False
    view.copy_(plain(gradient))
    if as_view:
        parameter.grad = view
    return True


def plain(gradient: Tensor) -> Tensor:
    """Return a gradient without its history."""
    # A gradient of a pass with create_graph is tracked; for the others a detach() would be their
    # dearest call.
    return gradient.detach() if gradient.requires_grad else gradient


class GradBucket:
    """What a communication hook gets: one bucket of gradients that are complete on this rank.

    Source:
        ``torch.distributed.GradBucket``, whose methods these are.
    """

    def __init__(self, bucket: Bucket, index: int, is_last: bool, group: Any = None) -> None:
        self._bucket = bucket
        self._group = group
        self._buffer = bucket.flat
        self._index = index
        self._is_last = is_last

    def index(self) -> int:
        """Return the bucket's place in the order of launch, from 0."""
        return self._index

    def is_last(self) -> bool:
        """Say whether it is the last to be launched in this backward pass."""
        return self._is_last

    def group(self) -> Any:
        """Return the native group of the module; None if the bucket was made without."""
        return self._group

    def slot(self) -> int:
        """Return the number of its memory: ``index()``, or that of a buffer in which several buckets take turns."""
        return self._index if self._bucket.buffer is None else self._bucket.buffer

    def takes_turns(self) -> bool:
        """Say whether buckets take turns in the memory, because their gradients leave to owners."""
        return self._bucket.buffer is not None

    def names(self) -> tuple[str, ...]:
        """Return the parameters' names; what a hook keeps for a parameter it keeps by name, because buckets change."""
        return self._bucket.names

    def buffer(self) -> Tensor:
        """Return the flat tensor of N elements."""
        return self._buffer

    def node_tensor(self) -> NodeTensor | None:
        """Return the buffer of all ranks, if it lies in memory that they share and no hook has replaced it."""
        return self._bucket.node_tensor if self._buffer is self._bucket.flat else None

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the flat tensor.

        Raises:
            ValueError: Another number of elements.
        """
        if buffer.numel() != self._bucket.flat.numel():
            raise ValueError(
                f"set_buffer needs a tensor of {self._bucket.flat.numel()} elements for bucket "
                f"{self._index}; "
                f"got shape {tuple(buffer.shape)}"
            )
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Return one view of the buffer for each parameter, in the parameter's shape."""
        if self._buffer is self._bucket.flat:
            return list(self._bucket.views)
        parts = self._buffer.view(-1).split([view.numel() for view in self._bucket.views])
        forms = self._bucket.forms
        return [
            part.as_strided(*form, part.storage_offset())
            for part, form in zip(parts, forms, strict=True)
        ]

    def forms(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """Return the shape and strides of each of ``gradients``: the same object as long as the buckets stay."""
        return self._bucket.forms

    def parameters(self) -> list[Tensor]:
        """Return the parameters whose gradients it holds, in the order in which they lie in the buffer."""
        return list(self._bucket.parameters)
