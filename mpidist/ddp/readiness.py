"""Readiness of gradients and buckets in backward passes: pure bookkeeping.

``Readiness`` counts the additions of one pass, ``ParameterUsage`` those that passes are to have.
Buckets are launched in the order of the plan, in whatever order their gradients are ready, so that
all ranks issue the same collectives.

Source: ``Reducer::mark_variable_ready`` of torch (torch/csrc/distributed/c10d/reducer.cpp).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mpidist.ddp.buckets.settings import Settings


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
        """Return whether no bucket is launched after this one, except those in ``ignored``."""
        return index == next(
            (other for other in reversed(self.launch_order) if other not in ignored), None
        )


class ParameterUsage:
    """Additions to the gradient of each parameter in one backward pass.

    Attributes:
        additions: Number of additions by place; None in a static graph before its first pass.
    """

    def __init__(self, names: Sequence[str], settings: Settings) -> None:
        self._names = names
        self._settings = settings
        self.additions: list[int] | None = None if settings.static_graph else [1] * len(names)
        # Places that no rank used in the first pass; None before that pass, or if none is skipped.
        self._unused: frozenset[int] | None = None

    @property
    def expected(self) -> list[int] | None:
        """Return the additions after which a gradient is ready; None to launch at the pass's end.

        Where modules communicate in the backward pass, and ranks may use different parameters, a
        bucket would otherwise be launched before a module's collective on one rank and after it on
        another.
        """
        settings = self._settings
        may_differ = settings.find_unused_parameters or settings.static_graph
        return None if settings.communicates_in_backward and may_differ else self.additions

    def record_additions(self, counts: Sequence[int]) -> None:
        """Record the first pass of a static graph."""
        if self.additions is None:
            self.additions = list(counts)

    def record_used(self, used: Sequence[bool]) -> None:
        """Record which parameters any rank used in the first pass, if the others are skipped."""
        if not self._settings.skip_unused or self._unused is not None:
            return
        self._unused = frozenset(place for place, is_used in enumerate(used) if not is_used)
        # A rank that has only shadowed passes of a static graph has not counted its additions.
        if self.additions is not None:
            for place in self._unused:
                self.additions[place] = 0

    def skipped(self, plan: Sequence[Sequence[int]]) -> frozenset[int]:
        """Return the indices of the buckets that are not reduced."""
        unused = self._unused or frozenset()
        return frozenset(index for index, places in enumerate(plan) if unused.issuperset(places))

    def surplus_error(self, place: int, count: int) -> str:
        """Return the text of the error for the ``count``-th addition, which is one too many."""
        name = self._names[place]
        if self._unused is not None and place in self._unused:
            return (
                f"parameter {name!r} received a gradient, but no rank used it in the first "
                "backward pass; skip_all_reduce_unused_params needs the same unused parameters in "
                "all of them"
            )
        if not self._settings.static_graph:
            return (
                f"the gradient of parameter {name!r} arrived twice in one backward pass; a "
                "parameter that several checkpointed segments share needs static_graph=True, or "
                "checkpoint(..., use_reentrant=False)"
            )
        first = self.additions[place] if self.additions is not None else 0
        return (
            f"the gradient of parameter {name!r} arrived {count} times in one backward pass, and "
            f"{first} times in the first: the graph is not static. Leave static_graph=True out; "
            "parameters that only some passes use need find_unused_parameters=True"
        )
