"""Gradient sums of one context's leaves on one worker, accumulated as AccumulateGrad does."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

from mpidist.autograd.fence import Fence

Tensor = torch.Tensor


class Gradients:
    """Thread-safe sums of gradients, by leaf."""

    def __init__(self) -> None:
        self._sums: dict[Tensor, Tensor] = {}
        self._fence = Fence()
        self._lock = threading.Lock()

    def add(self, found: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add gradients of leaves.

        The first gradient of a leaf is copied, in the leaf's layout: a node may return a tensor
        that is not its own result, for example a parameter, or one for two leaves. Later gradients
        are added in place, or out of place if the sum is sparse.

        Source: ``torch/csrc/autograd/functions/accumulate_grad.h``, without a graph of the
        gradients.
        """
        sums = self._sums
        with self._lock:
            self._fence.block_current_streams()
            for leaf, gradient in found:
                old = sums.get(leaf)
                gradient = gradient.detach()
                if old is None:
                    sums[leaf] = _copy(gradient, leaf)
                elif old.layout is torch.strided:
                    old.add_(gradient)
                else:
                    # torch supports dense + sparse, but not sparse + dense.
                    sums[leaf] = (
                        gradient + old if gradient.layout is torch.strided else old + gradient
                    )
                if not leaf.is_cpu:
                    self._fence.record((sums[leaf],))

    def all(self) -> dict[Tensor, Tensor]:
        """Return the sums so far, by leaf; the calling thread's current streams wait for them."""
        with self._lock:
            self._fence.block_current_streams(self._sums.values())
            return dict(self._sums)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _is_non_overlapping_and_dense(leaf: Tensor) -> bool:
    """Return whether a tensor is dense and without overlap, in any order of dimensions."""
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
    if _is_dense(leaf) and _is_non_overlapping_and_dense(leaf):
        return torch.empty_strided(
            leaf.shape, leaf.stride(), dtype=gradient.dtype, device=gradient.device
        ).copy_(gradient)
    return gradient.clone(memory_format=torch.contiguous_format)
