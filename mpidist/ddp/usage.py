"""Use of parameters in backward passes: additions to expect per gradient, parameters never used."""

from __future__ import annotations

from collections.abc import Sequence

from mpidist.ddp import gradient_errors
from mpidist.ddp.layout import Settings


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
        return None if self._settings.behind_all else self.additions

    def record_additions(self, counts: Sequence[int]) -> None:
        """Record the first pass of a static graph."""
        if self.additions is None:
            self.additions = list(counts)

    def record_used(self, used: Sequence[bool]) -> None:
        """Record which parameters any rank used in the first pass, if the others are skipped."""
        if not self._settings.skip_unused or self._unused is not None:
            return
        self._unused = frozenset(place for place, is_used in enumerate(used) if not is_used)
        # A rank that has only shadowed passes of a static graph does not know its additions.
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
            return gradient_errors.unused_before(name)
        if self._settings.static_graph:
            first = self.additions[place] if self.additions is not None else 0
            return gradient_errors.graph_changed(name, count, first)
        return gradient_errors.added_twice(name)
