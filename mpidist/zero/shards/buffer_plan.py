"""Plans of flat buffers (pure): one buffer for each dtype and device, each rank's shard contiguous.

Parameters and shards begin at multiples of 64 elements. torch's fused kernels treat the end of a
vector differently from its middle, so other cuts would change bits.

Letters: W ranks; N elements of a buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from mpidist.zero.shards.partition import cuts

UNIT = 64  # elements


class Slot(NamedTuple):
    """Place of one parameter: elements ``offset`` to ``offset + numel`` of the buffer."""

    number: int
    offset: int
    numel: int


class Span(NamedTuple):
    """Elements ``start`` to ``stop`` of a parameter, owned by one rank.

    The first one is element ``offset`` of the buffer.
    """

    number: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class BufferPlan:
    """One flat buffer.

    Attributes:
        dtype: Of its parameters.
        device: Of its parameters.
        slots: In the order of their offsets.
        bounds: W + 1 offsets: rank r owns the elements from the r-th to the next.
    """

    dtype: torch.dtype
    device: torch.device
    slots: tuple[Slot, ...]
    bounds: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return N."""
        return self.bounds[-1]

    @property
    def nbytes(self) -> int:
        """Return the buffer's bytes."""
        return self.numel * self.dtype.itemsize

    @cached_property
    def by_number(self) -> dict[int, Slot]:
        """Return the place of each parameter."""
        return {slot.number: slot for slot in self.slots}

    def spans(self, rank: int) -> list[Span]:
        """Return the spans that a rank owns, in the order of the buffer."""
        low, high = self.bounds[rank], self.bounds[rank + 1]
        found = []
        for number, offset, numel in self.slots:
            first, end = max(offset, low), min(offset + numel, high)
            if first < end:
                found.append(Span(number, first - offset, end - offset, first))
        return found

    def only(self, numbers: frozenset[int], dtype: torch.dtype, device: torch.device) -> BufferPlan:
        """Return a plan of some of the parameters, with the same owner of every element."""
        slots: list[Slot] = []
        moved: list[tuple[int, int, int]] = []  # old offset, padded length, new offset
        at = 0
        for number, offset, numel in self.slots:
            if number in numbers:
                slots.append(Slot(number, at, numel))
                moved.append((offset, padded(numel), at))
                at += padded(numel)
        bounds = [0]
        for bound in self.bounds[1:-1]:
            # A cut keeps its place in its parameter; without that parameter it moves to the next.
            lengths = [min(max(bound - offset, 0), length) for offset, length, _ in moved]
            bounds.append(sum(lengths))
        return BufferPlan(dtype, device, tuple(slots), (*bounds, at))


def padded(numel: int) -> int:
    """Return the next multiple of 64."""
    return -(-numel // UNIT) * UNIT


def whole(
    parameters: Mapping[int, torch.Tensor], owners: Mapping[int, int], ranks: int
) -> list[BufferPlan]:
    """Plan buffers in which each parameter belongs to one rank.

    Args:
        parameters: By number.
        owners: The rank of each.
        ranks: W.
    """
    plans = []
    for (dtype, device), numbers in _by_kind(parameters).items():
        slots, bounds = [], [0]
        for rank in range(ranks):
            at = bounds[-1]
            for number in numbers:
                if owners[number] == rank:
                    slots.append(Slot(number, at, parameters[number].numel()))
                    at += padded(parameters[number].numel())
            bounds.append(at)
        plans.append(BufferPlan(dtype, device, tuple(slots), tuple(bounds)))
    return plans


def cut(parameters: Mapping[int, torch.Tensor], ranks: int) -> list[BufferPlan]:
    """Plan buffers with shards of equal size up to 64 elements; the cuts go through parameters."""
    plans = []
    for (dtype, device), numbers in _by_kind(parameters).items():
        slots, at = [], 0
        for number in numbers:
            slots.append(Slot(number, at, parameters[number].numel()))
            at += padded(parameters[number].numel())
        plans.append(BufferPlan(dtype, device, tuple(slots), tuple(cuts(at, ranks, UNIT))))
    return plans


def split(plan: BufferPlan, parameters: Sequence[torch.Tensor]) -> list[BufferPlan]:
    """Split a plan by the present dtypes and devices of its parameters; owners stay the same."""
    kinds = _by_kind({slot.number: parameters[slot.number] for slot in plan.slots})
    return [
        plan.only(frozenset(numbers), dtype, device) for (dtype, device), numbers in kinds.items()
    ]


def owned_parts(plans: Sequence[BufferPlan]) -> dict[int, tuple[tuple[int, int, int], ...]]:
    """Return the owners of each parameter's elements, in memory order: (rank, start, stop)."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for plan in plans:
        for rank in range(len(plan.bounds) - 1):
            for span in plan.spans(rank):
                found.setdefault(span.number, []).append((rank, span.start, span.stop))
    return {number: tuple(spans) for number, spans in found.items()}


def _by_kind(
    parameters: Mapping[int, torch.Tensor],
) -> dict[tuple[torch.dtype, torch.device], Sequence[int]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number, parameter in parameters.items():
        if parameter.numel():  # without elements no place is needed
            kinds.setdefault((parameter.dtype, parameter.device), []).append(number)
    return dict(kinds)
