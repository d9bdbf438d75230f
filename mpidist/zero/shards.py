"""Shards of one optimizer's parameters on one rank: which parameters lie where, and what of them this rank steps.

Parameters come in when they first require a gradient, those of one call in flat buffers of their
own, and keep their place: frozen later they get memory of their own, and come back when they train
again. So no state ever changes its rank.

Letters: W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpidist.kernels.view import laid_out
from mpidist.zero import partition as partitions
from mpidist.zero.buffer_plan import BufferPlan, Slot, Span, cut, owned_parts, split, whole
from mpidist.zero.flat_buffers import FlatBuffers
from mpidist.zero.master_weights import Masters, exact_masters
from mpidist.zero.overlap import Gather
from mpidist.zero.partition import BALANCED, FLAT, Cost
from mpidist.zero.pieces import Piece

Tensor = torch.Tensor
Bounds = dict[Tensor, tuple[tuple[int, int, int], ...]]


class Shards:
    """The layout of one optimizer's parameters.

    Args:
        group: Native group.
        partition: ``"greedy"``, ``"balanced"`` or ``"flat"``.
        cost: Of a parameter, for ``"balanced"``.
        one_copy: The ranks of a node hold one copy of the parameters.
        has_masters: This rank steps copies of what it owns, not the parameters themselves.

    Attributes:
        parameters: By number.
        owners: For each number the rank that owns the parameter, if it is not cut.
        pieces: This rank's.
        plans: For each flat buffer its plan.
        flats: For each flat buffer its elements.
        masters: The master copies; none without ``has_masters``.
    """

    def __init__(
        self, group: Any, partition: str, cost: Cost, one_copy: bool, has_masters: bool
    ) -> None:
        self.parameters: list[Tensor] = []
        self.owners: list[int] = []
        self.pieces: list[Piece] = []
        self.plans: list[BufferPlan] = []
        self.flats: list[Tensor] = []
        self.masters = Masters()
        self._group = group
        self._partition = partition
        self._cost = cost
        self._one_copy = one_copy
        self._has_masters = has_masters
        self._loads: list[Any] = [0] * group.size
        self._buffers: list[FlatBuffers] = []
        self._pending: list[FlatBuffers] = []
        self._home: dict[int, FlatBuffers] = {}  # of each number that has a place
        self._placed: set[int] = set()  # numbers that lie in their place, or are empty and train

    @property
    def steps_parameters(self) -> bool:
        """Say whether this rank's pieces are whole parameters themselves."""
        return self._partition != FLAT and not self._has_masters

    def numbers(self) -> frozenset[int]:
        """Return the numbers of the parameters that some rank steps, or has stepped."""
        return frozenset(self._home.keys() | self._placed)

    def divided(self, parameters: Sequence[Tensor]) -> tuple[list[int], list[Any]]:
        """Return who would own further parameters, and what each rank would have then; changes and communicates nothing."""
        if self._partition == BALANCED:
            return partitions.balanced(
                [self._cost(p) if p.requires_grad else 1 for p in parameters], self._loads
            )
        return partitions.greedy(
            [p.numel() if p.requires_grad else 1 for p in parameters], self._loads
        )

    def add(self, parameters: Sequence[Tensor]) -> list[Piece]:
        """Number further parameters and decide who owns them; communicates nothing.

        Returns:
            This rank's pieces of them, as far as they are parameters themselves.
        """
        first = len(self.parameters)
        owners, self._loads = self.divided(parameters)
        self.parameters += parameters
        self.owners += owners
        if not self.steps_parameters:
            return []
        own = [
            Piece(
                number,
                self.parameters[number],
                0,
                self.parameters[number].numel(),
                self.parameters[number],
            )
            for number in range(first, len(self.parameters))
            if self.owners[number] == self._group.rank
        ]
        self.pieces += own
        return own

    def make(self) -> list[Piece]:
        """Make flat buffers for the parameters that require a gradient and have no place yet; they stay where they are.

        Collective: over the group.

        Returns:
            This rank's pieces of them that are not parameters themselves.
        """
        new = {
            number: parameter
            for number, parameter in enumerate(self.parameters)
            if parameter.requires_grad and number not in self._home and number not in self._placed
        }
        made = self._make_empty(
            [number for number, parameter in new.items() if not parameter.numel()]
        )
        plans = (
            cut(new, self._group.size)
            if self._partition == FLAT
            else whole(new, dict(enumerate(self.owners)), self._group.size)
        )
        if not plans:
            return made
        buffers = FlatBuffers(self._group, plans, new, self._one_copy)
        self._pending.append(buffers)
        self._buffers.append(buffers)
        for plan, flat in zip(buffers.plans, buffers.flats, strict=True):
            self._home.update(dict.fromkeys(plan.by_number, buffers))
            self._append(plan, flat)
            cut_pieces = self._make_pieces(len(self.plans) - 1)
            self.pieces += cut_pieces
            made += cut_pieces
        return made

    def place_parameters(self) -> None:
        """Move the parameters of the last ``make`` into their buffers.

        Collective: over the group.
        """
        pending, self._pending = self._pending, []
        for buffers in pending:
            buffers.place_parameters()
            self._placed.update(slot.number for plan in buffers.plans for slot in plan.slots)
        self.masters.renew(self.pieces)

    def refresh(self) -> None:
        """Give parameters that no longer require a gradient memory of their own; bring those back that do again.

        Collective: over the group.
        """
        for buffers in self._buffers:
            back = []
            for plan in buffers.plans:
                for slot in plan.slots:
                    trains = self.parameters[slot.number].requires_grad
                    if buffers.holds(slot.number) and not trains:
                        buffers.release(slot.number)
                        self._placed.discard(slot.number)
                    elif trains and not buffers.holds(slot.number):
                        back.append(slot.number)
            buffers.place(back)
            self._placed.update(back)
            self.masters.invalidate(back)
        self.masters.renew(self.pieces)

    def has_moved(self) -> bool:
        """Say whether parameters were put elsewhere since the last call (``module.to``, ``.half()``)."""
        return any(buffers.moved() for buffers in self._buffers)

    def has_new(self) -> bool:
        """Say whether a parameter trains that has no place in a buffer, or has left it."""
        placed = self._placed
        return any(
            p.requires_grad and number not in placed for number, p in enumerate(self.parameters)
        )

    def stepped(self) -> list[Piece]:
        """Return this rank's pieces of parameters that lie in their buffers, or are empty."""
        placed = self._placed
        return [piece for piece in self.pieces if piece.number in placed]

    def outside(self) -> list[Piece]:
        """Return this rank's pieces of parameters that lie in no buffer: frozen ones, which nobody steps."""
        placed = self._placed
        return [piece for piece in self.pieces if piece.number not in placed]

    def require_shapes(self) -> None:
        """Refuse parameters that have another shape than in their buffers.

        Raises:
            ValueError: There is one.
        """
        for buffers in self._buffers:
            buffers.require_shapes()

    def follow(self) -> None:
        """Make the buffers anew with the parameters' present devices and dtypes; each rank owns what it owned.

        Where ranks step vectors of elements, the elements keep the order in which they have lain:
        so does the state.

        Collective: over the group.
        """
        kept = (
            exact_masters(self.pieces, {n: home.view(n) for n, home in self._home.items()})
            if self._has_masters
            else {}
        )
        old, self._buffers = self._buffers, []
        self.plans, self.flats, self.masters.flats = [], [], []
        for buffers in old:
            plans = [again for plan in buffers.plans for again in split(plan, self.parameters)]
            inside = [
                slot.number for plan in plans for slot in plan.slots if buffers.holds(slot.number)
            ]
            held = {
                slot.number: self.parameters[slot.number] for plan in plans for slot in plan.slots
            }
            order = (
                {number: buffers.view(number) for number in held}
                if not self.steps_parameters
                else None
            )
            fresh = FlatBuffers(self._group, plans, held, self._one_copy, order)
            fresh.place(inside)
            self._buffers.append(fresh)
            for plan, flat in zip(fresh.plans, fresh.flats, strict=True):
                self._home.update(dict.fromkeys(plan.by_number, fresh))
                self._append(plan, flat)
                self._move_pieces(len(self.plans) - 1)
        for piece in self.pieces:
            if piece.home is None and not piece.is_parameter:
                piece.tensor.data = torch.empty_like(piece.parameter)
            elif piece.number in kept:
                piece.tensor.detach().copy_(kept[piece.number])
        self.masters.mark_current([piece for piece in self.pieces if piece.number in kept])
        self.masters.renew(self.pieces)

    def gather(self) -> None:
        """Bring what every rank has written into all copies; see ``FlatBuffers.gather``.

        Collective: over the group.
        """
        for buffers in self._buffers:
            buffers.gather()

    def gather_in_buckets(self, cap_bytes: float) -> list[Gather]:
        """Start the same in slices of at most ``cap_bytes``; see ``FlatBuffers.gather_slices``.

        Collective: over the group.
        """
        return [
            Gather([self.parameters[number] for number in numbers], works)
            for buffers in self._buffers
            for numbers, works in buffers.gather_slices(cap_bytes)
        ]

    def owned(self) -> list[list[int]]:
        """Return for each rank the numbers of the parameters that it owns, in whole or in part."""
        if self.steps_parameters:
            return [
                [number for number, owner in enumerate(self.owners) if owner == rank]
                for rank in range(self._group.size)
            ]
        return [
            [span.number for plan in self.plans for span in plan.spans(rank)]
            for rank in range(self._group.size)
        ]

    @property
    def is_one_copy(self) -> bool:
        """Say whether all of a node's ranks read all memory that this rank's step writes."""
        return all(buffers.is_one_copy for buffers in self._buffers)

    def bounds(self) -> Bounds:
        """Return for each parameter that has a place who owns which elements, in the order in which they lie."""
        return {self.parameters[number]: spans for number, spans in owned_parts(self.plans).items()}

    def slot(self, place: int, number: int) -> Slot:
        """Return the place of a parameter in a flat buffer."""
        return self.plans[place].by_number[number]

    def shard_sizes(self) -> dict[int, int]:
        """Return for each flat buffer the elements of this rank's shard."""
        rank = self._group.rank
        return {
            place: plan.bounds[rank + 1] - plan.bounds[rank]
            for place, plan in enumerate(self.plans)
        }

    def _append(self, plan: BufferPlan, flat: Tensor) -> None:
        self.plans.append(plan)
        self.flats.append(flat)
        if self._has_masters:
            low, high = plan.bounds[self._group.rank : self._group.rank + 2]
            self.masters.flats.append(torch.zeros_like(flat[low:high]))

    def _make_empty(self, numbers: Sequence[int]) -> list[Piece]:
        """Return this rank's pieces of parameters without elements: they have no place, but state as any other's."""
        self._placed.update(numbers)
        if self.steps_parameters:
            return []
        own = [
            (number, self.parameters[number])
            for number in numbers
            if self.owners[number] == self._group.rank
        ]
        made = [
            Piece(number, parameter, 0, 0, torch.nn.Parameter(torch.empty_like(parameter)))
            for number, parameter in own
        ]
        self.pieces += made
        return made

    def _make_pieces(self, place: int) -> list[Piece]:
        plan, made = self.plans[place], []
        low = plan.bounds[self._group.rank]
        own = {piece.number: piece for piece in self.pieces} if self.steps_parameters else {}
        for span in plan.spans(self._group.rank):
            home = (place, span.offset - low)
            if span.number in own:
                own[span.number].home = home
                continue
            tensor = torch.nn.Parameter(self._elements(place, span))
            made.append(
                Piece(
                    span.number, self.parameters[span.number], span.start, span.stop, tensor, home
                )
            )
        return made

    def _move_pieces(self, place: int) -> None:
        plan = self.plans[place]
        low = plan.bounds[self._group.rank]
        own = {piece.number: piece for piece in self.pieces}
        for span in plan.spans(self._group.rank):
            piece = own[span.number]
            piece.home = (place, span.offset - low)
            if not piece.is_parameter:
                piece.tensor.data = self._elements(place, span)

    def _elements(self, place: int, span: Span) -> Tensor:
        """Return what the base optimizer steps: elements of the flat buffer, or of the master copy of the shard."""
        memory, offset, view = (
            self.flats[place],
            span.offset,
            self._home[span.number].view(span.number),
        )
        if self._has_masters:
            memory, offset = (
                self.masters.flats[place],
                offset - self.plans[place].bounds[self._group.rank],
            )
        part = memory[offset : offset + span.stop - span.start]
        # Whole parameters keep their shape: the base optimizer may look at it.
        return laid_out(part, view) if part.numel() == view.numel() else part
