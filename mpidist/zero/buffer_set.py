"""All flat buffers of one sharded optimizer, found by place and by parameter number.

Letters: W ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, KeysView

import torch

from mpidist.zero.buffer_plan import BufferPlan
from mpidist.zero.flat_buffers import FlatBuffers

Tensor = torch.Tensor


class BufferSet:
    """Flat buffers in the order in which they were made.

    Attributes:
        plans: One for each flat buffer.
        flats: The elements of each flat buffer.
    """

    def __init__(self) -> None:
        self.plans: list[BufferPlan] = []
        self.flats: list[Tensor] = []
        self._allocations: list[FlatBuffers] = []
        self._by_number: dict[int, FlatBuffers] = {}

    def append(self, allocation: FlatBuffers) -> range:
        """Add buffers; return their places in ``plans`` and ``flats``."""
        first = len(self.plans)
        self._allocations.append(allocation)
        self.plans += allocation.plans
        self.flats += allocation.flats
        for plan in allocation.plans:
            self._by_number.update(dict.fromkeys(plan.by_number, allocation))
        return range(first, len(self.plans))

    def __iter__(self) -> Iterator[FlatBuffers]:
        return iter(self._allocations)

    @property
    def numbers(self) -> KeysView[int]:
        """Return the numbers of the parameters with a place in a buffer."""
        return self._by_number.keys()

    def view(self, number: int) -> Tensor:
        """Return a parameter's place in its buffer, in the parameter's shape."""
        return self._by_number[number].view(number)

    @property
    def is_one_copy(self) -> bool:
        """Return whether all ranks of a node read the memory that this rank's step writes."""
        return all(allocation.is_one_copy for allocation in self._allocations)

    def has_moved(self) -> bool:
        """Return whether parameters have left their buffers (``module.to``, ``.half()``)."""
        return any(allocation.moved() for allocation in self._allocations)

    def require_shapes(self) -> None:
        """Refuse parameters of another shape than their places.

        Raises:
            ValueError: A shape differs.
        """
        for allocation in self._allocations:
            allocation.require_shapes()

    def gather(self) -> None:
        """Copy every rank's shards to all ranks; see ``FlatBuffers.gather``.

        Collective: over the group.
        """
        for allocation in self._allocations:
            allocation.gather()

    def shard_sizes(self, rank: int) -> dict[int, int]:
        """Return the elements of a rank's shard of each flat buffer, by place."""
        return {
            place: plan.bounds[rank + 1] - plan.bounds[rank]
            for place, plan in enumerate(self.plans)
        }
