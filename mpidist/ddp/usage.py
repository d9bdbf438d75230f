"""Use of parameters in backward passes: additions to expect per gradient, parameters never used."""

from __future__ import annotations

from collections.abc import Sequence

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
