"""Averages that one rank alone holds, weighted when a later backward pass adds to them.

All ranks hold a plain average, so that a pass which adds to the average and averages again leaves
it as it is. An average that its owner alone holds would be divided by W. So the owner multiplies it
by W before an averaging pass adds to it. A pass that is not averaged (under ``no_sync``, or of the
module without DDP) needs the average itself, which is copied first: from the copy, the next
averaging pass adds W - 1 times the average, unless the gradient was cleared or changed meanwhile.

Letters: W ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from mpidist.ddp.buckets.weak_hook import weak_hook

Tensor = torch.Tensor


@dataclass
class Marks:
    """Gradients that are averages, or to which averages were added, by place.

    Attributes:
        addresses: The address of each average.
        copies: For an average to which local gradients were added, a copy from before, and the
            gradient's address and version since.
    """

    addresses: dict[int, int] = field(default_factory=dict)
    copies: dict[int, tuple[Tensor, int, int]] = field(default_factory=dict)

    def places(self) -> set[int]:
        """Return the places with a mark."""
        return self.addresses.keys() | self.copies.keys()


class AccumulatedAverages:
    """Averages of one reducer's parameters that this rank alone holds.

    Args:
        places: Places in ``parameters`` of those with owners.
        size: W.
        is_averaging: Returns whether autograd's additions now will be averaged.
        before: The averages under the last owners; their hooks are removed.
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
        self.marks = Marks()
        self._nodes: list[tuple[Node, RemovableHandle]] = []
        self._parameters = parameters
        if before is not None:
            before.close()
            # Averages that were cleared since are forgotten, because other gradients may soon have
            # their addresses.
            self.marks = before.marks
            for place in self.marks.places():
                self._forget_if_gone(place)
        addition = weak_hook(self, AccumulatedAverages.before_addition)
        for place in self.marks.places().union(places):
            if not parameters[place].requires_grad:
                continue
            # A hook of the node runs before autograd's addition, and not for torch.autograd.grad(),
            # which adds nothing. The node is kept, because its hook would end with it.
            node = torch.autograd.graph.get_gradient_edge(parameters[place]).node
            self._nodes.append((node, node.register_prehook(partial(addition, place))))

    def close(self) -> None:
        """Remove the hooks. A second call does nothing."""
        for _, handle in self._nodes:
            handle.remove()
        self._nodes.clear()

    def __del__(self) -> None:
        self.close()

    def record(self, place: int, average: Tensor) -> None:
        """Record that a parameter's gradient is an average that this rank alone holds."""
        self.forget(place)
        self.marks.addresses[place] = average.data_ptr()

    def forget(self, place: int) -> None:
        """Record that a parameter's gradient is no such average any more."""
        self.marks.addresses.pop(place, None)
        self.marks.copies.pop(place, None)

    def set_aside(self) -> Marks:
        """Remove and return all marks, for ``restore`` when the gradients are restored."""
        for place in self.marks.places():
            self._forget_if_gone(place)
        held, self.marks = self.marks, Marks()
        return held

    def restore(self, marks: Marks) -> None:
        """Restore marks that were set aside, once the gradients have their values again."""
        self.marks = marks
        for place in list(marks.copies):
            gradient = self._parameters[place].grad
            # The values may have been copied back, which changes the version.
            if gradient is not None:
                self.record_addition(place, gradient)

    def weigh(self, place: int, gradient: Tensor, target: Tensor) -> None:
        """Weight an average in ``target``, which is ``gradient`` or a copy, as a contribution."""
        addresses, copies = self.marks.addresses, self.marks.copies
        if addresses.get(place) == gradient.data_ptr():
            target.mul_(self._size)
        elif place in copies and copies[place][1:] == (gradient.data_ptr(), gradient._version):
            target.add_(copies[place][0], alpha=self._size - 1)
        self.forget(place)

    def record_addition(self, place: int, gradient: Tensor) -> None:
        """Record the version of a gradient after a pass that is not averaged."""
        copies = self.marks.copies
        if place in copies:
            copies[place] = (copies[place][0], gradient.data_ptr(), gradient._version)

    def before_addition(self, place: int, _gradients: object) -> None:
        """Weight an average, or copy it, before autograd adds to it; a hook of its node."""
        addresses, copies = self.marks.addresses, self.marks.copies
        if (place not in addresses and place not in copies) or self._forget_if_gone(place):
            return
        gradient = self._parameters[place].grad
        assert gradient is not None
        if self._is_averaging():
            self.weigh(place, gradient, gradient.detach())
        elif place in addresses:
            self.forget(place)
            copies[place] = (gradient.detach().clone(), -1, -1)

    def _forget_if_gone(self, place: int) -> bool:
        """Forget an average that was cleared or replaced; return whether it was."""
        addresses, copies = self.marks.addresses, self.marks.copies
        gradient = self._parameters[place].grad
        is_there = gradient is not None and gradient.layout is torch.strided
        if gradient is not None and is_there:
            now = gradient.data_ptr(), gradient._version
            is_there = addresses.get(place) == now[0] or (
                place in copies and copies[place][1:] == now
            )
        if not is_there:
            self.forget(place)
        return not is_there
