"""Shards of one optimizer's parameters: their flat buffers, and the pieces this rank steps.

A parameter gets its place when it first requires a gradient; the parameters of one call share new
flat buffers. A frozen parameter gets memory of its own and returns to its place when it trains
again, so no optimizer state ever changes its rank.

Letters: W ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from mpidist.comm.group_types import Group
from mpidist.kernels.view import laid_out
from mpidist.zero.shards.buffer_plan import BufferPlan, Span, cut, owned_parts, split, whole
from mpidist.zero.shards.flat_buffers import FlatBuffers
from mpidist.zero.shards.half_wire import HalfWire
from mpidist.zero.shards.master_weights import Masters, exact_masters
from mpidist.zero.shards.partition import FLAT, Cost, Owners
from mpidist.zero.shards.pieces import Piece

Tensor = torch.Tensor


class Shards:
    """Layout and memory of one optimizer's parameters.

    Args:
        group: Native group.
        partition: ``"greedy"``, ``"balanced"`` or ``"flat"``.
        cost: Of a parameter, for ``"balanced"``.
        one_copy: The ranks of a node hold one copy of the parameters.
        wire: Format of shards on the network: this rank steps copies of its shards. If None it
            steps the parameters themselves, and shards are sent as they are.

    Attributes:
        group: As given.
        parameters: By number.
        owners: The owning rank of each parameter, if it is not cut.
        pieces: This rank's.
        plans: One for each flat buffer, in the order in which they were made.
        flats: The elements of each flat buffer.
        outside: Those of ``pieces`` whose parameters are frozen, in no buffer.
        is_one_copy: All ranks of a node read the memory that this rank's step writes.
        wire: As given.
        masters: The master copies; empty without a wire.
        steps_parameters: This rank's pieces are whole parameters themselves.
    """

    def __init__(
        self,
        group: Group,
        partition: str,
        cost: Cost,
        one_copy: bool,
        wire: HalfWire | None = None,
    ) -> None:
        self.parameters: list[Tensor] = []
        self.owners = Owners(partition, cost, group.size)
        self.pieces: list[Piece] = []
        self.plans: list[BufferPlan] = []
        self.flats: list[Tensor] = []
        self.is_one_copy = True  # of no buffer yet
        self.outside: list[Piece] = []
        self.masters = Masters()
        self.steps_parameters = partition != FLAT and wire is None
        self.group = group
        self.wire = wire
        self._partition = partition
        self._one_copy = one_copy
        self._buffers: list[FlatBuffers] = []  # of each call of make
        self._buffers_of: dict[int, FlatBuffers] = {}  # by parameter number
        self._pending: list[FlatBuffers] = []  # allocated, without parameters
        self._placed: set[int] = set()  # numbers of parameters in their place, or empty and trained
        self._trained: list[Tensor] = []  # the parameters of these numbers

    def stepped_numbers(self) -> frozenset[int]:
        """Return the numbers of the parameters that a rank steps or has stepped."""
        return frozenset(self._buffers_of.keys() | self._placed)

    def without_piece(self, numbers: Iterable[int]) -> list[int]:
        """Return the numbers, of those given, of the parameters that no rank steps yet."""
        if self.steps_parameters:
            return []
        stepped = self.stepped_numbers()
        return [number for number in numbers if number not in stepped]

    def add(self, parameters: Sequence[Tensor]) -> list[Piece]:
        """Number more parameters and choose their owners; communicates nothing.

        Returns:
            This rank's new pieces that are parameters themselves.
        """
        first = len(self.parameters)
        self.parameters += parameters
        self.owners.add(parameters)
        if not self.steps_parameters:
            return []
        own = [
            Piece(number, parameter, 0, parameter.numel(), parameter)
            for number, parameter in enumerate(parameters, first)
            if self.owners[number] == self.group.rank
        ]
        self.pieces += own
        return own

    def make(self) -> list[Piece]:
        """Allocate flat buffers for trained parameters without a place. The parameters do not move.

        Collective: over the group.

        Returns:
            This rank's new pieces that are not parameters themselves.
        """
        new = {
            number: parameter
            for number, parameter in enumerate(self.parameters)
            if parameter.requires_grad
            and number not in self._buffers_of
            and number not in self._placed
        }
        pieces = self._make_empty([number for number, p in new.items() if not p.numel()])
        plans = (
            cut(new, self.group.size)
            if self._partition == FLAT
            else whole(new, dict(enumerate(self.owners)), self.group.size)
        )
        if plans:
            buffers = FlatBuffers(self.group, plans, new, self._one_copy)
            self._pending.append(buffers)
            pieces += self._append(buffers)
        self.pieces += pieces
        return pieces

    def place_parameters(self) -> None:
        """Move the parameters of the last ``make`` into their buffers.

        Collective: over the group.
        """
        pending, self._pending = self._pending, []
        for buffers in pending:
            numbers = [slot.number for plan in buffers.plans for slot in plan.slots]
            buffers.place(numbers)
            self._placed.update(numbers)
        self._note_placed()
        self.masters.renew(self.pieces)

    def refresh(self) -> None:
        """Move frozen parameters to memory of their own, and retrained ones to their places.

        Collective: over the group.
        """
        for buffers in self._buffers:
            returning = []
            for plan in buffers.plans:
                for slot in plan.slots:
                    trains = self.parameters[slot.number].requires_grad
                    if buffers.holds(slot.number) and not trains:
                        buffers.release(slot.number)
                        self._placed.discard(slot.number)
                    elif trains and not buffers.holds(slot.number):
                        returning.append(slot.number)
            buffers.place(returning)
            self._placed.update(returning)
            self.masters.invalidate(returning)
        self._note_placed()
        self.masters.renew(self.pieces)

    def has_new(self) -> bool:
        """Return whether a trained parameter is not in its place."""
        placed = self._placed
        for number, parameter in enumerate(self.parameters):
            if parameter.requires_grad and number not in placed:
                return True
        return False

    def has_moved(self) -> bool:
        """Return whether parameters have left their buffers (``module.to``, ``.half()``)."""
        return any(map(FlatBuffers.moved, self._buffers))

    def require_shapes(self) -> None:
        """Refuse parameters of another shape than their places.

        Raises:
            ValueError: A shape differs.
        """
        for buffers in self._buffers:
            buffers.require_shapes()

    def gather(self) -> None:
        """Copy every rank's shards to all ranks.

        Collective: over the group, after a barrier that follows every rank's step.

        Blocks: until this rank's parameters are complete.
        """
        group, wire = self.group, self.wire
        if group.size > 1:
            if wire is not None:
                for plan, flat, own in zip(self.plans, self.flats, self.masters.flats, strict=True):
                    wire.share(group, own, flat, plan.bounds)
            # Ranks that share one copy on one node have nothing to copy.
            elif not (self.is_one_copy and group.is_single_node):
                for buffers in self._buffers:
                    buffers.gather()
        elif self.steps_parameters:
            return
        # What was written into the buffers has left the parameters' own version counters alone, by
        # which autograd refuses a graph that needs the old values. Like a plain optimizer's step
        # it has changed those with a gradient.
        written = []
        for parameter in self._trained:
            if parameter.grad is not None:
                written.append(parameter)
        torch.autograd.graph.increment_version(written)
        if wire is not None:
            self.masters.mark_current(self.pieces)

    def stepped(self) -> list[Piece]:
        """Return this rank's pieces of parameters that are in their places, or empty."""
        placed = self._placed
        return [piece for piece in self.pieces if piece.number in placed]

    def follow(self) -> None:
        """Reallocate the buffers on the parameters' present devices, in their present dtypes.

        Each rank keeps its elements. Where ranks step vectors of elements, the elements keep their
        former order in memory, and so does their state.

        Collective: over the group.
        """
        buffers_of, old = self._buffers_of, self._buffers
        self._buffers, self._buffers_of = [], {}
        self.plans, self.flats, self.is_one_copy = [], [], True
        kept: Mapping[int, Tensor] = {}
        if self.wire is not None:
            self.masters.settle(self.pieces)
            places = {number: former.view(number) for number, former in buffers_of.items()}
            kept = exact_masters(self.pieces, places)
        self.masters.flats = []
        for former in old:
            plans = [new for plan in former.plans for new in split(plan, self.parameters)]
            numbers = [slot.number for plan in plans for slot in plan.slots]
            order = (
                None
                if self.steps_parameters
                else {number: former.view(number) for number in numbers}
            )
            parameters = {number: self.parameters[number] for number in numbers}
            buffers = FlatBuffers(self.group, plans, parameters, self._one_copy, order)
            buffers.place([number for number in numbers if former.holds(number)])
            self._append(buffers)
        for piece in self.pieces:
            if piece.home is None and not piece.is_parameter:
                piece.tensor.data = torch.empty_like(piece.parameter)
            elif piece.number in kept:
                piece.tensor.detach().copy_(kept[piece.number])
        self.masters.mark_current([piece for piece in self.pieces if piece.number in kept])
        self.masters.renew(self.pieces)

    def owned(self) -> list[list[int]]:
        """Return for each rank the numbers of the parameters that it owns, whole or in part."""
        ranks = range(self.group.size)
        if self.steps_parameters:
            return [
                [number for number, owner in enumerate(self.owners) if owner == rank]
                for rank in ranks
            ]
        return [[span.number for plan in self.plans for span in plan.spans(rank)] for rank in ranks]

    def bounds(self) -> dict[Tensor, tuple[tuple[int, int, int], ...]]:
        """Return the owners of each placed parameter's elements: (rank, start, stop)."""
        spans = owned_parts(self.plans)
        return {self.parameters[number]: parts for number, parts in spans.items()}

    def by_owner(self) -> list[list[list[Tensor]]]:
        """Return for each parameter the tensors of it that each rank owns: vectors of a cut one."""
        spans = {} if self.steps_parameters else owned_parts(self.plans)
        found = []
        for number, parameter in enumerate(self.parameters):
            held: list[list[Tensor]] = [[] for _ in range(self.group.size)]
            parts = spans.get(number, ())
            if len(parts) > 1:
                flat = parameter.detach().as_strided(
                    (parameter.numel(),), (1,), parameter.storage_offset()
                )
                for rank, start, stop in parts:
                    held[rank].append(flat[start:stop])
            else:
                held[parts[0][0] if parts else self.owners[number]].append(parameter)
            found.append(held)
        return found

    def sizes(self) -> list[int]:
        """Return the elements of this rank's shard of each flat buffer."""
        rank = self.group.rank
        return [plan.bounds[rank + 1] - plan.bounds[rank] for plan in self.plans]

    def _note_placed(self) -> None:
        placed = self._placed
        self._trained = [self.parameters[number] for number in sorted(placed)]
        self.outside = [piece for piece in self.pieces if piece.number not in placed]

    def _append(self, buffers: FlatBuffers) -> list[Piece]:
        """Add buffers, and point this rank's pieces to their elements; return the new pieces."""
        first, rank, made = len(self.plans), self.group.rank, []
        own = {piece.number: piece for piece in self.pieces}
        self._buffers.append(buffers)
        self.plans += buffers.plans
        self.flats += buffers.flats
        self.is_one_copy = self.is_one_copy and buffers.is_one_copy
        for index, plan in enumerate(buffers.plans, first):
            self._buffers_of.update(dict.fromkeys(plan.by_number, buffers))
            low, high = plan.bounds[rank : rank + 2]
            if self.wire is not None:
                self.masters.flats.append(torch.zeros_like(self.flats[index][low:high]))
            for span in plan.spans(rank):
                home = (index, span.offset - low)
                piece = own.get(span.number)
                if piece is None:
                    parameter = self.parameters[span.number]
                    tensor = _stepped(self._elements(home, span))
                    made.append(Piece(span.number, parameter, span.start, span.stop, tensor, home))
                else:
                    piece.home = home
                    if not piece.is_parameter:
                        piece.tensor.data = self._elements(home, span)
        return made

    def _make_empty(self, numbers: Sequence[int]) -> list[Piece]:
        """Return pieces of this rank's empty parameters, which have state but no place."""
        self._placed.update(numbers)
        if self.steps_parameters:
            return []
        own = [
            (number, self.parameters[number])
            for number in numbers
            if self.owners[number] == self.group.rank
        ]
        return [
            Piece(number, parameter, 0, 0, _stepped(torch.empty_like(parameter)))
            for number, parameter in own
        ]

    def _elements(self, home: tuple[int, int], span: Span) -> Tensor:
        """Return a span's elements of the flat buffer, or of this rank's master copy."""
        index, start = home
        if self.wire is None:
            memory, start = self.flats[index], span.offset
        else:
            memory = self.masters.flats[index]
        part = memory[start : start + span.stop - span.start]
        view = self._buffers_of[span.number].view(span.number)
        # Whole parameters keep their shape: the base optimizer may read it.
        return laid_out(part, view) if part.numel() == view.numel() else part


def _stepped(elements: Tensor) -> torch.nn.Parameter:
    """Return a parameter of the base optimizer; its gradient has the dtype that the user's has."""
    made = torch.nn.Parameter(elements)
    made.grad_dtype = None
    return made
