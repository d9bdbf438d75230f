"""Places of parameters in flat buffers (pure): one buffer a dtype and device, each rank's shard contiguous.

Parameters begin at multiples of 64 elements and shards are cut at such: elsewhere torch's fused
kernels, which treat the end of a vector otherwise than its middle, give other bits.

Letters: W ranks; N elements of a buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch

from mpidist.zero.partition import cuts

UNIT = 64  # elements


class Slot(NamedTuple):
    """Place of one parameter: its number, and its elements ``offset`` to ``offset + numel`` of the buffer."""

    number: int
    offset: int
    numel: int


class Span(NamedTuple):
    """Part of a parameter that one rank owns: elements ``start`` to ``stop`` of it, from ``offset`` on in the buffer."""

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
        """Return what a rank owns, in the order of the buffer."""
        low, high = self.bounds[rank], self.bounds[rank + 1]
        found = []
        for number, offset, numel in self.slots:
            first, end = max(offset, low), min(offset + numel, high)
            if first < end:
                found.append(Span(number, first - offset, end - offset, first))
        return found

    def only(self, numbers: frozenset[int], dtype: torch.dtype, device: torch.device) -> BufferPlan:
        """Return a plan of some of the parameters, of which every rank owns what it owns here."""
        slots: list[Slot] = []
        moved: list[tuple[int, int, int]] = []  # where each was, its padded length, where it is
        at = 0
        for number, offset, numel in self.slots:
            if number in numbers:
                slots.append(Slot(number, at, numel))
                moved.append((offset, padded(numel), at))
                at += padded(numel)
        bounds = [0]
        for bound in self.bounds[1:-1]:
            # A cut keeps its place in the parameter that it goes through; one that has gone leaves
            # it to its neighbour.
            lengths = [min(max(bound - offset, 0), length) for offset, length, _ in moved]
            bounds.append(sum(lengths))
        return BufferPlan(dtype, device, tuple(slots), (*bounds, at))

    def parts(self) -> list[tuple[int, int]]:
        """Return the first and the end element of each rank's shard."""
        return list(pairwise(self.bounds))


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
    """Plan buffers whose shards have the same size up to 64 elements; the cuts go through parameters."""
    plans = []
    for (dtype, device), numbers in _by_kind(parameters).items():
        slots, at = [], 0
        for number in numbers:
            slots.append(Slot(number, at, parameters[number].numel()))
            at += padded(parameters[number].numel())
        plans.append(BufferPlan(dtype, device, tuple(slots), tuple(cuts(at, ranks, UNIT))))
    return plans


def split(plan: BufferPlan, parameters: Sequence[torch.Tensor]) -> list[BufferPlan]:
    """Return plans of a plan's parameters, one for each dtype and device that they have now; each rank owns what it owned."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for slot in plan.slots:
        parameter = parameters[slot.number]
        kinds.setdefault((parameter.dtype, parameter.device), []).append(slot.number)
    return [
        plan.only(frozenset(numbers), dtype, device) for (dtype, device), numbers in kinds.items()
    ]


def owned_parts(plans: Sequence[BufferPlan]) -> dict[int, tuple[tuple[int, int, int], ...]]:
    """Return for each parameter who owns which elements: (rank, start, stop), in the order in which they lie."""
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
        if parameter.numel():  # an empty one has no place, and no rank need step it
            kinds.setdefault((parameter.dtype, parameter.device), []).append(number)
    return dict(kinds)
