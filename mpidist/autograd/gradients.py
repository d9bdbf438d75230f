"""Gradients of one context's leaves on one worker: taken over, copied or added, as AccumulateGrad does."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable

import torch

from mpidist.autograd.fence import Fence

Tensor = torch.Tensor

# of a gradient that nobody else holds: its pair, the loop's variable, the argument of getrefcount
_HOLDERS = 3


class Gradients:
    """The sums. Any thread may add to them."""

    def __init__(self) -> None:
        self._sums: dict[Tensor, Tensor] = {}
        self._fence = Fence()
        self._lock = threading.Lock()

    def add(self, found: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add gradients of leaves.

        A first gradient is taken over if nobody else holds it and it is laid out as its leaf, else
        copied. Later ones are added in place; to a sparse sum, and sparse ones to each other, out
        of place.

        Source: ``torch/csrc/autograd/functions/accumulate_grad.h``, without a graph of the
        gradients.
        """
        sums = self._sums
        with self._lock:
            self._fence.hold()
            for leaf, gradient in found:
                old = sums.get(leaf)
                # a node has returned what is not its own, a parameter say
                if gradient.requires_grad:
                    gradient = gradient.detach().clone()
                if old is None:
                    is_alone = sys.getrefcount(gradient) <= _HOLDERS
                    sums[leaf] = (
                        gradient if is_alone and _fits(gradient, leaf) else _copy(gradient, leaf)
                    )
                elif old.layout is torch.strided:
                    old.add_(gradient)
                else:
                    # torch adds a sparse tensor to a dense one, and not the other way round.
                    sums[leaf] = (
                        gradient + old if gradient.layout is torch.strided else old + gradient
                    )
                if not leaf.is_cpu:
                    self._fence.record((sums[leaf],))

    def all(self) -> dict[Tensor, Tensor]:
        """Return the sums so far, by leaf; the calling thread's current streams wait until they are there."""
        with self._lock:
            self._fence.hold(self._sums.values())
            return dict(self._sums)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _fits(gradient: Tensor, leaf: Tensor) -> bool:
    if gradient.layout is torch.sparse_coo:
        return gradient._indices().is_contiguous() and gradient._values().is_contiguous()
    if not _is_dense(gradient):
        return True
    if not _is_dense(leaf) or leaf.is_contiguous():
        return gradient.is_contiguous()
    return gradient.stride() == leaf.stride() or (
        not _has_own_places(leaf) and gradient.is_contiguous()
    )


def _has_own_places(leaf: Tensor) -> bool:
    """Say whether a tensor's elements fill its memory, each in a place of its own (in any order)."""
    expected = 1
    for stride, size in sorted(zip(leaf.stride(), leaf.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _copy(gradient: Tensor, leaf: Tensor) -> Tensor:
    if not _is_dense(gradient):
        return gradient.clone()
    if _is_dense(leaf) and _has_own_places(leaf):
        return torch.empty_strided(
            leaf.shape, leaf.stride(), dtype=gradient.dtype, device=gradient.device
        ).copy_(gradient)
    return gradient.clone(memory_format=torch.contiguous_format)
