"""Gradient averaging by the data-parallel modules that a backward pass reaches on one worker.

A reducer (``ddp/autograd_context``) receives the gradients of its parameters through hooks while
nodes run. At the end of the pass the reducer returns the averages over its group.
"""

from __future__ import annotations

from mpidist.autograd.context import Context
from mpidist.autograd.dependencies import Plan
from mpidist.autograd.recording import Tensor
from mpidist.ddp.autograd_context import Reduction

LeafGradient = tuple[Tensor, Tensor]


class Reductions:
    """The reducers of one context whose parameters are leaves of a plan, opened for one pass.

    Raises:
        Exception: A reducer cannot be opened; those opened before are closed again.
    """

    __slots__ = ("_opened",)

    def __init__(self, context: Context, plan: Plan) -> None:
        self._opened: list[Reduction] = []
        if not context.reductions:
            return
        leaves = [node.variable for capture in plan.captures.values() for node in capture.leaves]
        try:
            for reduction in list(context.reductions.values()):
                if any(map(reduction.owns, leaves)):
                    reduction.open()
                    self._opened.append(reduction)
        except BaseException:
            self.close()
            raise

    def exchange(self, found: list[LeafGradient], is_last: bool) -> list[LeafGradient]:
        """Drop the gradients that reducers have received, and add the averages at the pass's end.

        Args:
            found: Leaves with their gradients.
            is_last: No more gradients arrive in this pass.
        """
        if not self._opened:
            return found
        kept = [
            pair for pair in found if not any(reduction.owns(pair[0]) for reduction in self._opened)
        ]
        if is_last:
            kept += [pair for reduction in self._opened for pair in reduction.finish()]
        return kept

    def close(self) -> None:
        """Close all reducers: the pass has failed."""
        for reduction in self._opened:
            reduction.close()
