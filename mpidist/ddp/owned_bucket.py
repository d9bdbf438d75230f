"""A bucket whose gradients leave to their owners, in a buffer that other buckets use before and after it.

A gradient that it takes is freed at once; so at any time there are the gradients of few buckets.
When the bucket is reduced, each rank copies what it owns into memory of its own, and the next
bucket may have the buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mpidist.comm.algorithms.shared_memory import NodeTensor
from mpidist.ddp.accumulated_averages import AccumulatedAverages
from mpidist.ddp.bucket import Bucket, plain
from mpidist.ddp.ownership import Bounds, Range
from mpidist.kernels.view import laid_out

Tensor = torch.Tensor


@dataclass(frozen=True)
class Owners:
    """Owners of one module's gradients, as its buckets need them.

    Attributes:
        bounds: By the parameter's place; one that is missing is common.
        buffers: How many buffers the buckets take turns in.
        rank: This rank.
        averages: The averages that this rank alone holds.
        kept: By place, the memory of this rank's averages, if passes shall use it again; None for
            fresh tensors in each.
    """

    bounds: Mapping[int, Bounds]
    buffers: int
    rank: int
    averages: AccumulatedAverages
    kept: dict[int, Tensor] | None = field(default_factory=dict)

    def ranges(self, place: int, numel: int) -> tuple[Range, ...]:
        """Return which elements of a parameter's average this rank gets."""
        bounds = self.bounds.get(place)
        if bounds is None:
            return ((0, numel),) if numel else ()
        return tuple(
            (start, stop) for rank, start, stop in bounds if rank == self.rank and start < stop
        )


class OwnedBucket(Bucket):
    """Gradients that travel together to their owners.

    Args:
        flat: The buffer's first N elements, if it is no memory of the node.
        buffer: The buffer's number.

    Attributes:
        present: Places of the parameters whose gradient it has taken in this pass.
    """

    def __init__(
        self,
        indices: Sequence[int],
        parameters: Sequence[Tensor],
        names: Sequence[str],
        node_tensor: NodeTensor | None,
        flat: Tensor,
        buffer: int,
        owners: Owners,
    ) -> None:
        super().__init__(indices, parameters, names, node_tensor, flat)
        self.buffer = buffer
        self.present: set[int] = set()
        self._owners = owners
        self._results: dict[int, Tensor] = {}
        self._view_of = dict(zip(self.indices, self.views, strict=True))
        # place, parameter, where it begins, what is ours
        self._parts: list[tuple[int, Tensor, int, tuple[Range, ...]]] = []
        begin = 0
        for place, parameter in zip(self.indices, self.parameters, strict=True):
            ranges = owners.ranges(place, parameter.numel())
            if ranges:
                self._parts.append((place, parameter, begin, ranges))
            begin += parameter.numel()

    def begin(self) -> None:
        """Prepare for a pass."""
        self.present.clear()
        self._results.clear()

    def attach_gradients(self) -> None:
        """Leave the gradients: none is a view of a buffer."""

    def take(self, place: int, parameter: Tensor) -> None:
        """Take one complete gradient while the buffer is the bucket's; one of another layout is left to ``collect``."""
        gradient = parameter.grad
        if gradient is not None and gradient.layout is torch.strided and place not in self.present:
            self._view_of[place].copy_(plain(gradient))
            self._taken(place, parameter, gradient)

    def collect(self, as_views: bool) -> list[tuple[str, torch.layout]]:
        """Take the gradients that it has not yet; zeros for a parameter without.

        Return name and layout of those refused.
        """
        targets, sources, missing, refused, found = [], [], [], [], []
        for place, name, view, parameter in zip(
            self.indices, self.names, self.views, self.parameters, strict=True
        ):
            gradient = parameter.grad
            if place in self.present:
                continue
            if gradient is None or gradient.layout is not torch.strided:
                missing.append(view)
                if gradient is not None:
                    refused.append((name, gradient.layout))
                continue
            targets.append(view)
            sources.append(plain(gradient))
            found.append((place, parameter, gradient))
        if missing:
            torch._foreach_zero_(missing)
        self._copy_together(targets, sources, is_pack=True)
        for place, parameter, gradient in found:
            self._taken(place, parameter, gradient)
        return refused

    def keep(self) -> None:
        """Copy what this rank owns out of the buffer, which is the next bucket's afterwards."""
        targets, sources = [], []
        for place, parameter, begin, ranges in self._parts:
            result = self._results[place] = self._memory_of(place, parameter)
            own = result.as_strided((parameter.numel(),), (1,), result.storage_offset())
            if ranges != ((0, parameter.numel()),):
                own.zero_()
            for start, stop in ranges:
                targets.append(own[start:stop])
                sources.append(self.flat[begin + start : begin + stop])
        if targets:
            torch._foreach_copy_(targets, sources)

    def hand_back(self, used: Sequence[bool], as_views: bool) -> None:
        """Make what was kept the parameters' gradients, where any rank has one; those of others' parameters are None."""
        for place, parameter, _, _ in self._parts:
            if used[place]:
                parameter.grad = self._results[place]
                if place in self._owners.bounds:
                    self._owners.averages.record(place, self._results[place])
        self._results.clear()

    def _taken(self, place: int, parameter: Tensor, gradient: Tensor) -> None:
        self._owners.averages.weigh(place, gradient, self._view_of[place])
        self.present.add(place)
        # its memory may be another stream's, which must not use it before the copy has ended
        if gradient.is_cuda:
            gradient.record_stream(torch.cuda.current_stream(gradient.device))
        parameter.grad = None

    def _memory_of(self, place: int, parameter: Tensor) -> Tensor:
        kept = self._owners.kept
        if kept is not None and place in kept:
            return kept[place]
        flat = torch.empty(parameter.numel(), dtype=self.flat.dtype, device=self.flat.device)
        result = laid_out(flat, parameter)
        if kept is not None:
            kept[place] = result
        return result
