"""Readiness of gradients and buckets in one backward pass: pure bookkeeping.

Buckets are launched in the order of the plan, in whatever order their gradients are ready, so that
all ranks issue the same collectives.

Source: ``Reducer::mark_variable_ready`` of torch (torch/csrc/distributed/c10d/reducer.cpp).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


class Readiness:
    """Counts of one backward pass.

    Args:
        buckets: For each bucket the places of its parameters.
        expected: Number of additions to each gradient in the pass; None if unknown, and then no
            bucket is ready before the end.
        skipped: Buckets that are not launched.

    Attributes:
        counts: Number of additions to each gradient so far.
        ready_order: Places of the ready gradients, in the order in which they became ready.
        may_launch: Whether a bucket has become ready since the last ``pop_ready``.
        bucket_of: For each parameter the index of its bucket.
        launch_order: Indices of the buckets to launch.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[int]],
        expected: Sequence[int] | None,
        skipped: Collection[int] = frozenset(),
    ) -> None:
        count = sum(map(len, buckets))
        self.counts = [0] * count
        self.ready_order: list[int] = []
        self.may_launch = False
        self._left = None if expected is None else list(expected)
        self.bucket_of = [0] * count
        for index, places in enumerate(buckets):
            for place in places:
                self.bucket_of[place] = index
        self.launch_order = [index for index in range(len(buckets)) if index not in skipped]
        # Number of gradients that each bucket waits for. A bucket that waits for none is launched
        # with the one before it.
        self._pending = [
            1 if expected is None else sum(expected[place] > 0 for place in buckets[index])
            for index in range(len(buckets))
        ]
        self._next = 0  # index into ``launch_order``

    def mark_ready(self, place: int) -> int:
        """Count one addition to a gradient; return how many are left, below 0 for a surplus one."""
        self.counts[place] += 1
        if self._left is None:
            self.ready_order.append(place) if self.counts[place] == 1 else None
            return 1
        left = self._left[place] = self._left[place] - 1
        if not left:
            self.ready_order.append(place)
            index = self.bucket_of[place]
            self._pending[index] -= 1
            if not self._pending[index]:
                self.may_launch = True
        return left

    def pop_ready(self) -> list[int]:
        """Return the buckets that can be launched now and have not been returned before."""
        self.may_launch = False
        start = self._next
        while (
            self._next < len(self.launch_order) and not self._pending[self.launch_order[self._next]]
        ):
            self._next += 1
        return self.launch_order[start : self._next]

    def pop_rest(self) -> list[int]:
        """Return all buckets that have not been returned before, ready or not."""
        start, self._next = self._next, len(self.launch_order)
        return self.launch_order[start:]

    def is_last(self, index: int, ignored: Collection[int] = frozenset()) -> bool:
        """Say whether no bucket is launched after this one, except those in ``ignored``."""
        return index == next(
            (other for other in reversed(self.launch_order) if other not in ignored), None
        )
