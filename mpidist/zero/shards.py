"""Shards of one optimizer's parameters on one rank: which parameters lie where, and what of them this rank steps.

Parameters come in when they first require a gradient, those of one call in flat buffers of their own, and keep their place:
frozen later they get memory of their own, and come back when they train again. So no state ever changes its rank.

Letters: W ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mpidist.zero import partition as partitions
from mpidist.zero.buffer_plan import BufferPlan, Slot, cut, whole
from mpidist.zero.flat_buffers import FlatBuffers, in_memory_order
from mpidist.zero.overlap import Gather
from mpidist.zero.partition import FLAT, GREEDY, Cost
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
        masters: For each flat buffer the copy of this rank's shard; empty without ``has_masters``.
    """

    def __init__(self, group: Any, partition: str, cost: Cost, one_copy: bool, has_masters: bool) -> None:
        self.parameters: list[Tensor] = []
        self.owners: list[int] = []
        self.pieces: list[Piece] = []
        self.plans: list[BufferPlan] = []
        self.flats: list[Tensor] = []
        self.masters: list[Tensor] = []
        self._group = group
        self._partition = partition
        self._cost = cost
        self._one_copy = one_copy
        self._has_masters = has_masters
        self._loads: list[Any] = [0] * group.size
        self._buffers: list[FlatBuffers] = []
        self._pending: list[FlatBuffers] = []
        self._home: dict[int, FlatBuffers] = {}  # of each number that has a place
        self._versions: dict[int, int] = {}  # of parameters whose masters are up to date

    @property
    def steps_parameters(self) -> bool:
        """Say whether this rank's pieces are whole parameters themselves."""
        return self._partition != FLAT and not self._has_masters

    def add(self, parameters: Sequence[Tensor]) -> list[Piece]:
        """Number further parameters and decide who owns them; communicates nothing.

        Returns:
            This rank's pieces of them, as far as they are parameters themselves.
        """
        first = len(self.parameters)
        self.parameters += parameters
        if self._partition == GREEDY or self._partition == FLAT:
            sizes = [parameter.numel() if parameter.requires_grad else 1 for parameter in parameters]
            owners, self._loads = partitions.greedy(sizes, self._loads)
        else:
            costs = [self._cost(parameter) if parameter.requires_grad else 1 for parameter in parameters]
            owners, self._loads = partitions.balanced(costs, self._loads)
        self.owners += owners
        if not self.steps_parameters:
            return []
        own = [
            Piece(number, self.parameters[number], 0, self.parameters[number].numel(), self.parameters[number])
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
            if parameter.requires_grad and number not in self._home
        }
        plans = (
            cut(new, self._group.size) if self._partition == FLAT else whole(new, dict(enumerate(self.owners)), self._group.size)
        )
        if not plans:
            return []
        buffers = FlatBuffers(self._group, plans, new, self._one_copy)
        self._pending.append(buffers)
        self._buffers.append(buffers)
        made: list[Piece] = []
        for plan, flat in zip(buffers.plans, buffers.flats, strict=True):
            for slot in plan.slots:
                self._home[slot.number] = buffers
            self._append(plan, flat)
            made += self._make_pieces(len(self.plans) - 1)
        self.pieces += made
        return made

    def adopt(self) -> None:
        """Move the parameters of the last ``make`` into their buffers. Collective: over the group."""
        pending, self._pending = self._pending, []
        for buffers in pending:
            buffers.adopt()
        self.renew_masters()

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
                        buffers.evict(slot.number)
                    elif trains and not buffers.holds(slot.number):
                        back.append(slot.number)
            buffers.bring_in(back)
        self._versions.clear()
        self.renew_masters()

    def has_moved(self) -> bool:
        """Say whether parameters were put elsewhere since the last call (``module.to``, ``.half()``)."""
        return any(buffers.moved() for buffers in self._buffers)

    def follow(self) -> None:
        """Make the buffers anew with the parameters' present devices and dtypes; each rank owns what it owned.

        Collective: over the group.
        """
        old, self._buffers = self._buffers, []
        self.plans, self.flats, self.masters = [], [], []
        self._versions.clear()
        for buffers in old:
            plans = [again for plan in buffers.plans for again in self._split(plan)]
            inside = [slot.number for plan in plans for slot in plan.slots if buffers.holds(slot.number)]
            held = {slot.number: self.parameters[slot.number] for plan in plans for slot in plan.slots}
            fresh = FlatBuffers(self._group, plans, held, self._one_copy)
            fresh.bring_in(inside)
            self._buffers.append(fresh)
            for plan, flat in zip(fresh.plans, fresh.flats, strict=True):
                for slot in plan.slots:
                    self._home[slot.number] = fresh
                self._append(plan, flat)
                self._move_pieces(len(self.plans) - 1)
        self.renew_masters()

    def gather(self, numbers: frozenset[int] | None = None, async_op: bool = False) -> list[Any]:
        """Bring what every rank has written into all copies; see ``FlatBuffers.gather``. Collective: over the group."""
        return [work for buffers in self._buffers for work in buffers.gather(numbers, async_op)]

    def gather_in_buckets(self, cap_bytes: float) -> list[Gather]:
        """Start the same in slices of at most ``cap_bytes``; see ``FlatBuffers.gather_slices``. Collective: over the group."""
        return [
            Gather([self.parameters[number] for number in numbers], works)
            for buffers in self._buffers
            for numbers, works in buffers.gather_slices(cap_bytes)
        ]

    def owned(self) -> list[list[int]]:
        """Return for each rank the numbers of the parameters that it owns, in whole or in part."""
        if self.steps_parameters:
            return [[number for number, owner in enumerate(self.owners) if owner == rank] for rank in range(self._group.size)]
        return [[span.number for plan in self.plans for span in plan.spans(rank)] for rank in range(self._group.size)]

    @property
    def is_one_copy(self) -> bool:
        """Say whether other ranks read the memory that this rank's step writes."""
        return any(buffers.is_one_copy for buffers in self._buffers)

    def bounds(self) -> Bounds:
        """Return for each parameter that has a place who owns which elements, in the order in which they lie."""
        found: dict[Tensor, list[tuple[int, int, int]]] = {}
        for plan in self.plans:
            for rank in range(self._group.size):
                for span in plan.spans(rank):
                    found.setdefault(self.parameters[span.number], []).append((rank, span.start, span.stop))
        return {parameter: tuple(spans) for parameter, spans in found.items()}

    def slot(self, place: int, number: int) -> Slot:
        """Return the place of a parameter in a flat buffer."""
        return next(slot for slot in self.plans[place].slots if slot.number == number)

    def shard_sizes(self) -> dict[int, int]:
        """Return for each flat buffer the elements of this rank's shard."""
        rank = self._group.rank
        return {place: plan.bounds[rank + 1] - plan.bounds[rank] for place, plan in enumerate(self.plans)}

    def renew_masters(self) -> None:
        """Take over into the masters what somebody has written into parameters since the last ``note_masters``."""
        if not self._has_masters:
            return
        with torch.no_grad():
            for piece in self.pieces:
                if piece.home is not None and self._versions.get(piece.number) != piece.parameter._version:
                    values = in_memory_order(piece.parameter.detach(), piece.parameter)[piece.start : piece.stop]
                    piece.tensor.detach().copy_(values.view(piece.tensor.shape))
        self.note_masters()

    def note_masters(self) -> None:
        """Note that the masters are up to date with the parameters."""
        self._versions = {piece.number: piece.parameter._version for piece in self.pieces}

    def _append(self, plan: BufferPlan, flat: Tensor) -> None:
        self.plans.append(plan)
        self.flats.append(flat)
        if self._has_masters:
            low, high = plan.bounds[self._group.rank : self._group.rank + 2]
            self.masters.append(torch.zeros_like(flat[low:high]))

    def _make_pieces(self, place: int) -> list[Piece]:
        plan, made = self.plans[place], []
        low = plan.bounds[self._group.rank]
        own = {piece.number: piece for piece in self.pieces} if self.steps_parameters else {}
        for span in plan.spans(self._group.rank):
            home = (place, span.offset - low)
            if span.number in own:
                own[span.number].home = home
                continue
            parameter = self.parameters[span.number]
            tensor = torch.nn.Parameter(self._elements(place, span.offset, span.stop - span.start, parameter))
            made.append(Piece(span.number, parameter, span.start, span.stop, tensor, home))
        return made

    def _move_pieces(self, place: int) -> None:
        plan = self.plans[place]
        low = plan.bounds[self._group.rank]
        own = {piece.number: piece for piece in self.pieces}
        for span in plan.spans(self._group.rank):
            piece = own[span.number]
            piece.home = (place, span.offset - low)
            if not piece.is_parameter:
                piece.tensor.data = self._elements(place, span.offset, span.stop - span.start, piece.parameter)

    def _elements(self, place: int, offset: int, numel: int, parameter: Tensor) -> Tensor:
        """Return what the base optimizer steps: elements of the flat buffer, or of the master copy of the shard."""
        memory = self.flats[place]
        if self._has_masters:
            memory, offset = self.masters[place], offset - self.plans[place].bounds[self._group.rank]
        part = memory[offset : offset + numel]
        # Whole parameters keep their shape: the base optimizer may look at it.
        return part.view(parameter.shape) if numel == parameter.numel() and parameter.is_contiguous() else part

    def _split(self, plan: BufferPlan) -> Iterable[BufferPlan]:
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for slot in plan.slots:
            parameter = self.parameters[slot.number]
            kinds.setdefault((parameter.dtype, parameter.device), []).append(slot.number)
        return [plan.only(frozenset(numbers), dtype, device) for (dtype, device), numbers in kinds.items()]
