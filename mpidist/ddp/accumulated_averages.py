"""Averages that one rank alone holds, when a later backward pass adds to them.

A plain average stands on all ranks, so that a pass which adds to it and averages again leaves it as
it is. One that its owner alone holds would be divided by W. So the owner multiplies it by W before
an averaging pass adds to it. A pass that is not averaged (under ``no_sync``, or of the module
beside DDP) finds it as it is, and a copy is taken: with it the next averaging pass adds W - 1 times
the average, unless the gradient was cleared or changed meanwhile.

Letters: W ranks of the group.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

Tensor = torch.Tensor
# By place: the address of each average that stands, and the copies of those with local gradients
# added, with address and version.
Marks = tuple[dict[int, int], dict[int, tuple[Tensor, int, int]]]


class AccumulatedAverages:
    """Averages of one reducer's parameters.

    Args:
        places: Of the parameters with owners, in ``parameters``.
        size: W.
        is_averaging: Says whether the gradients that arrive now will be averaged.
        before: What stood under other owners, and still does.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        places: Iterable[int],
        size: int,
        is_averaging: Callable[[], bool],
        before: AccumulatedAverages | None = None,
    ) -> None:
        self._size = size
        self._is_averaging = is_averaging
        self.marks: Marks = ({}, {})
        self._nodes: list[tuple[Any, Any]] = []
        self._parameters = parameters
        if before is not None:
            before.close()
            # Those that were cleared since are forgotten: their addresses may be other gradients'
            # soon.
            self.marks = before.marks
            for place in set().union(*self.marks):
                self._forget_if_gone(place)
        addition = _weak_hook(self)
        for place in set(places).union(*self.marks):
            if not parameters[place].requires_grad:
                continue
            # Before autograd's addition, and not before torch.autograd.grad(), which adds nothing:
            # a hook of the node, which stays as long as somebody holds the node.
            node = torch.autograd.graph.get_gradient_edge(parameters[place]).node
            self._nodes.append((node, node.register_prehook(partial(addition, place))))

    def close(self) -> None:
        """Remove the hooks. Again does nothing."""
        for _, handle in self._nodes:
            handle.remove()
        self._nodes.clear()

    def __del__(self) -> None:
        self.close()

    def record(self, place: int, average: Tensor) -> None:
        """Note that a parameter's gradient is an average that this rank alone holds."""
        self.forget(place)
        self.marks[0][place] = average.data_ptr()

    def forget(self, place: int) -> None:
        """Note that it is none any more."""
        for marks in self.marks:
            marks.pop(place, None)

    def set_aside(self) -> Marks:
        """Take all marks away, with the gradients; return what is to be ``restored`` when those are back."""
        for place in set().union(*self.marks):
            self._forget_if_gone(place)
        held, self.marks = self.marks, ({}, {})
        return held

    def restore(self, marks: Marks) -> None:
        """Take marks that were put aside, once the gradients have their values again."""
        self.marks = marks
        for place in list(marks[1]):
            gradient = self._parameters[place].grad
            # its values may have been copied back, which counts as a change
            if gradient is not None:
                self.record_addition(place, gradient)

    def weigh(self, place: int, gradient: Tensor, target: Tensor) -> None:
        """Make a contribution of an average: in ``target``, which is ``gradient`` or its copy."""
        averages, copies = self.marks
        if averages.get(place) == gradient.data_ptr():
            target.mul_(self._size)
        elif place in copies and copies[place][1:] == (gradient.data_ptr(), gradient._version):
            target.add_(copies[place][0], alpha=self._size - 1)
        self.forget(place)

    def record_addition(self, place: int, gradient: Tensor) -> None:
        """Note what a gradient is after a pass that is not averaged."""
        copies = self.marks[1]
        if place in copies:
            copies[place] = (copies[place][0], gradient.data_ptr(), gradient._version)

    def before_addition(self, place: int) -> None:
        """Weigh what stands, or copy it, before autograd adds to it."""
        averages, copies = self.marks
        if (place not in averages and place not in copies) or self._forget_if_gone(place):
            return
        gradient = self._parameters[place].grad
        assert gradient is not None
        if self._is_averaging():
            self.weigh(place, gradient, gradient.detach())
        elif place in averages:
            self.forget(place)
            copies[place] = (gradient.detach().clone(), -1, -1)

    def _forget_if_gone(self, place: int) -> bool:
        """Forget what was cleared, or replaced by another tensor; say whether it was."""
        averages, copies = self.marks
        gradient = self._parameters[place].grad
        is_there = gradient is not None and gradient.layout is torch.strided
        if gradient is not None and is_there:
            now = gradient.data_ptr(), gradient._version
            is_there = averages.get(place) == now[0] or (
                place in copies and copies[place][1:] == now
            )
        if not is_there:
            self.forget(place)
        return not is_there


def _weak_hook(averages: AccumulatedAverages) -> Callable[[int, Any], None]:
    # Autograd's nodes keep their hooks, and the collector does not see what those refer to.
    reference = weakref.ref(averages)

    def before(place: int, gradients: Any) -> None:
        owner = reference()
        if owner is not None:
            owner.before_addition(place)

    return before
