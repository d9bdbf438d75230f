"""Which gradients of a backward pass are complete, and which buckets may therefore leave: pure bookkeeping.

Buckets leave in the order of the plan, whatever the order of arrival, so that all ranks issue the
same collectives.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


class Readiness:
    """One backward pass.

    Args:
        buckets: For each bucket the places of its parameters.
        expected: How often the gradient of each parameter will be added to; None if that is not
            known yet, and then no bucket is ready before the end.
        skipped: Buckets that do not leave.

    Attributes:
        counts: How often each parameter's gradient was added to.
        ready_order: The places of complete gradients, in the order of their completion.
        may_launch: Whether a bucket has become complete since ``pop_ready`` was asked last.
        bucket_of: For each parameter its bucket.
        launch_order: The buckets that leave, in order.
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
        # Gradients that a bucket still waits for; a bucket that awaits none goes with the one
        # before it.
        self._pending = [
            1 if expected is None else sum(expected[place] > 0 for place in buckets[index])
            for index in range(len(buckets))
        ]
        self._next = 0  # in ``launch_order``

    def mark_ready(self, place: int) -> int:
        """Count one arrival; return how many more this parameter awaits, less than 0 if it awaited none."""
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
        """Return the buckets that may leave now and have not yet, in order."""
        self.may_launch = False
        start = self._next
        while (
            self._next < len(self.launch_order) and not self._pending[self.launch_order[self._next]]
        ):
            self._next += 1
        return self.launch_order[start : self._next]

    def pop_rest(self) -> list[int]:
        """Return all buckets that have not left yet, complete or not."""
        start, self._next = self._next, len(self.launch_order)
        return self.launch_order[start:]

    def is_last(self, index: int, ignored: Collection[int] = frozenset()) -> bool:
        """Say whether no bucket leaves after this one, those of ``ignored`` apart."""
        return index == next(
            (other for other in reversed(self.launch_order) if other not in ignored), None
        )
