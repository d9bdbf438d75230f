"""State of one rank's base optimizer as data: flat tensors, other values by parameter, and layout.

Each form in which state is saved reads a ``ShardState``, and a load makes one of its form. A state
refers to the optimizer's own tensors, valid until the next step, or holds copies, for readers that
work while training continues.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias, TypeGuard

import torch

from mpidist.comm.algorithms import staging
from mpidist.comm.memory import host_values
from mpidist.zero.shards.buffer_plan import BufferPlan
from mpidist.zero.shards.groups import Groups
from mpidist.zero.shards.pieces import Piece
from mpidist.zero.state.flat_state import FlatState, Kind, ParamState, State
from mpidist.zero.state.result_memory import KeptMemory

Tensor = torch.Tensor
StateByNumber: TypeAlias = dict[int, ParamState]

# Flat buffer, name and dtype. Not the device, which may differ between ranks.
KindKey: TypeAlias = tuple[int, str, torch.dtype]

# Name of a wire's master copies among a parameter's state.
MASTER_KIND = "mpidist.master"


class InFlat(NamedTuple):
    """Entry of a value inside a flat tensor: the index of its kind."""

    kind: int


@dataclass(frozen=True)
class ShardState:
    """State of one rank.

    Attributes:
        rank: The rank whose state this is.
        groups: Of all parameters, with a key for each parameter.
        entries: By parameter number and name of the state: InFlat, or the value. A tensor of at
            least one dimension is state that is not flat: factored moments, deferred state, and
            all state of a load by parameters.
        deferred: The rank that keeps the state of each parameter that no rank steps yet, by number.
        plans: Of the flat buffers.
        forms: For each parameter a tensor on the meta device with its shape and strides.
        kinds: Of the flat tensors.
        flats: The tensor of each kind, with as many elements as the rank's shard of the buffer.
        masters: The rank's full-precision shard of each flat buffer; empty if the base optimizer
            steps the parameters themselves, or if they are entries.
    """

    rank: int
    groups: Groups
    entries: StateByNumber
    deferred: Mapping[int, int]
    plans: tuple[BufferPlan, ...]
    forms: tuple[Tensor, ...]
    kinds: tuple[KindKey, ...] = ()
    flats: tuple[Tensor, ...] = ()
    masters: tuple[Tensor, ...] = ()

    def outside(self) -> Iterator[tuple[int, str, Tensor]]:
        """Yield number, name and tensor of the state that is not flat, in the entries' order."""
        for number, values in self.entries.items():
            for name, value in values.items():
                if is_outside(value):
                    yield number, name, value

    def held_by(self, piece: Piece) -> ParamState | None:
        """Return a piece's state, or None; its flat state are views."""
        held = self.entries.get(piece.number)
        if held is None:
            return None
        return {
            name: piece.state_view(self.flats[value.kind]) if isinstance(value, InFlat) else value
            for name, value in held.items()
        }

    def copied(self, memory: KeptMemory) -> ShardState:
        """Return a state of copies in host memory.

        Args:
            memory: For the copies; reused from an earlier state if none of its tensors is alive.
        """
        outside = list(self.outside())
        own = (*self.flats, *(value for *_, value in outside), *self.masters)
        copies = memory.tensors(
            {index: (tensor.numel(), tensor.dtype) for index, tensor in enumerate(own)}
        )
        made = [copies[index].view(tensor.shape) for index, tensor in enumerate(own)]
        staging.copy_to_host(made, own)
        rest = iter(made)
        flats = tuple(itertools.islice(rest, len(self.flats)))
        entries = self.entries
        if outside:
            entries = {number: dict(values) for number, values in entries.items()}
            for number, name, _ in outside:
                entries[number][name] = next(rest)
        return replace(self, flats=flats, entries=entries, masters=tuple(rest))

    def with_masters(self) -> ShardState:
        """Return a state whose masters are a kind of state."""
        if not self.masters:
            return self
        kinds, flats = list(self.kinds), list(self.flats)
        entries = {number: dict(values) for number, values in self.entries.items()}
        for buffer, flat in enumerate(self.masters):
            entry = InFlat(len(kinds))
            for span in self.plans[buffer].spans(self.rank):
                entries.setdefault(span.number, {})[MASTER_KIND] = entry
            kinds.append((buffer, MASTER_KIND, flat.dtype))
            flats.append(flat)
        return replace(self, kinds=tuple(kinds), flats=tuple(flats), entries=entries, masters=())


def entries_of(
    pieces: Iterable[Piece], flat: FlatState, state: State, deferred: Mapping[int, ParamState]
) -> StateByNumber:
    """Return the entries of a rank whose state is flat, with copies of scalars.

    Args:
        state: The base optimizer's.
        deferred: State of parameters that no rank steps yet, by number.
    """
    # One entry a kind: the garbage collector scans every tuple of an entry.
    kinds = {kind: InFlat(index) for index, kind in enumerate(flat.kinds)}
    entries: StateByNumber = {}
    for piece in pieces:
        values = state.get(piece.tensor)
        if values is None:
            continue
        entries[piece.number] = {
            name: kinds[Kind(piece.home[0], name, value.dtype, value.device)]
            if piece.home is not None and flat.belongs(value, piece)
            else _entry(value)
            for name, value in values.items()
        }
    for number, kept in deferred.items():
        entries[number] = {name: _entry(value) for name, value in kept.items()}
    _copy_scalars(entries)
    return entries


def is_outside(value: object) -> TypeGuard[Tensor]:
    """Return whether an entry is a tensor of at least one dimension outside the flat ones."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def forms_of(parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return a tensor on the meta device of each parameter's shape, strides and dtype."""
    return tuple(
        torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta") for p in parameters
    )


def _entry(value: object) -> object:
    return value.detach() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _copy_scalars(entries: StateByNumber) -> None:
    """Replace scalar tensors by copies in host memory; fused steps count on the device."""
    found = [
        (values, name, value)
        for values in entries.values()
        for name, value in values.items()
        if isinstance(value, torch.Tensor) and not value.dim()
    ]
    copies = host_values.copies_of([value for _, _, value in found])
    for (values, name, _), value in zip(found, copies, strict=True):
        values[name] = value
