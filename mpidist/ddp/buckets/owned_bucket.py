"""A bucket whose gradients are reduced to their owners, in a buffer that other buckets use in turn.

A gradient is freed as soon as the bucket holds a copy, so that only the gradients of a few buckets
exist at a time. After the reduction each rank copies the elements that it owns to memory of its
own, and the next bucket uses the buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mpidist.comm.algorithms.shared_memory import SharedTensor
from mpidist.ddp.buckets.accumulated_averages import AccumulatedAverages
from mpidist.ddp.buckets.bucket import Bucket
from mpidist.ddp.buckets.ownership import Bounds, Range
from mpidist.kernels.view import laid_out

Tensor = torch.Tensor


@dataclass(frozen=True)
class Owners:
    """Owners of one module's gradients, by place, and this rank's averages.

    Attributes:
        bounds: By the parameter's place; all ranks get the average of a parameter without bounds.
        buffers: Number of buffers in which the buckets rotate.
        rank: This rank.
        averages: The averages that this rank alone holds.
        kept: By place, memory of this rank's averages for all passes; None for new tensors in each
            pass.
    """

    bounds: Mapping[int, Bounds]
    buffers: int
    rank: int
    averages: AccumulatedAverages
    kept: dict[int, Tensor] | None = field(default_factory=dict)

    def ranges(self, place: int, numel: int) -> tuple[Range, ...]:
        """Return the ranges of a parameter's average that this rank gets."""
        bounds = self.bounds.get(place)
        if bounds is None:
            return ((0, numel),) if numel else ()
        return tuple(
            (start, stop) for rank, start, stop in bounds if rank == self.rank and start < stop
        )


class OwnedBucket(Bucket):
    """Gradients that are reduced together to their owners.

    Args:
        flat: The buffer's first N elements, unless ``node_tensor`` is given.
        buffer: The buffer's number.
    """

    def __init__(
        self,
        indices: Sequence[int],
        parameters: Sequence[Tensor],
        names: Sequence[str],
        node_tensor: SharedTensor | None,
        flat: Tensor,
        buffer: int,
        owners: Owners,
    ) -> None:
        super().__init__(indices, parameters, names, node_tensor, flat)
        self.buffer = buffer
        self._owners = owners
        self._results: dict[int, Tensor] = {}
        # Place, parameter, offset in ``flat``, and this rank's ranges.
        self._parts: list[tuple[int, Tensor, int, tuple[Range, ...]]] = []
        begin = 0
        for place, parameter in zip(self.indices, self.parameters, strict=True):
            ranges = owners.ranges(place, parameter.numel())
            if ranges:
                self._parts.append((place, parameter, begin, ranges))
            begin += parameter.numel()

    def begin_pass(self) -> None:
        """Forget the gradients and results of the last pass."""
        super().begin_pass()
        self._results.clear()

    def attach_gradients(self) -> None:
        """Do nothing: no gradient is a view of a rotating buffer."""

    def collect(self, as_views: bool) -> list[tuple[str, torch.layout]]:
        """Copy the gradients that are not in the bucket yet; see ``Bucket.collect``."""
        return self._collect_together(as_views)

    def copy_owned(self) -> None:
        """Copy this rank's elements out of the buffer, which the next bucket may then use."""
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
        """Make this rank's averages the parameters' gradients, where any rank has a gradient."""
        for place, parameter, _, _ in self._parts:
            if used[place]:
                parameter.grad = self._results[place]
                if place in self._owners.bounds:
                    self._owners.averages.record(place, self._results[place])
        self._results.clear()

    def _after_copy(self, place: int, parameter: Tensor, gradient: Tensor, as_view: bool) -> None:
        self._owners.averages.weigh(place, gradient, self.view_of[place])
        self.copied.add(place)
        # The gradient's memory may belong to another stream, which must not reuse it before the
        # copy has ended.
        if gradient.is_cuda:
            gradient.record_stream(torch.cuda.current_stream(gradient.device))
        parameter.grad = None

    def _after_copies(self, copies: Sequence[tuple[int, Tensor, Tensor]], as_views: bool) -> None:
        for copy in copies:
            self._after_copy(*copy, as_views)

    def _memory_of(self, place: int, parameter: Tensor) -> Tensor:
        kept = self._owners.kept
        if kept is not None and place in kept:
            return kept[place]
        flat = torch.empty(parameter.numel(), dtype=self.flat.dtype, device=self.flat.device)
        result = laid_out(flat, parameter)
        if kept is not None:
            kept[place] = result
        return result
