"""Image of one rank's state as data: flat tensors, other values by parameter, and the layout.

An image refers to the optimizer's own tensors, valid until the next step, or holds copies, for
readers that work while training continues.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch

from mpidist.comm.algorithms import staging
from mpidist.comm.memory import host_values
from mpidist.zero.buffer_plan import BufferPlan
from mpidist.zero.flat_state import FlatState, Kind, State
from mpidist.zero.result_memory import KeptMemory
from mpidist.zero.shards import Shards
from mpidist.zero.state_dict import MASTER_KIND, SEEN_KIND, StateByNumber

Tensor = torch.Tensor

# Flat buffer, name and dtype. Not the device, which may differ between ranks.
KindKey: TypeAlias = tuple[int, str, torch.dtype]


class InFlat(NamedTuple):
    """Entry of a value inside a flat tensor: the place of its kind in the image."""

    kind: int


class Loose(NamedTuple):
    """Entry of a tensor outside the flat ones: its place among the image's loose tensors."""

    place: int


@dataclass(frozen=True)
class ShardImage:
    """State of one rank.

    Attributes:
        rank: The rank whose state this is.
        kinds: Of the flat tensors.
        flats: The tensor of each kind, with as many elements as the rank's shard of the buffer.
        loose: Tensors of at least one dimension outside the flat ones: factored moments, state
            without a piece.
        entries: By parameter number and name of the state: InFlat, Loose, or the value.
        masters: The rank's full-precision shard of each flat buffer; empty if the base optimizer
            steps the parameters themselves.
        seen: What all ranks see of these shards; empty if the masters give it.
        plans: Of the flat buffers.
        forms: For each parameter a tensor on the meta device with its shape and strides.
    """

    rank: int
    kinds: tuple[KindKey, ...]
    flats: tuple[Tensor, ...]
    loose: tuple[Tensor, ...]
    entries: StateByNumber
    masters: tuple[Tensor, ...]
    seen: tuple[Tensor, ...]
    plans: tuple[BufferPlan, ...]
    forms: tuple[Tensor, ...]

    def copied(self, memory: KeptMemory) -> ShardImage:
        """Return an image of copies in host memory.

        Args:
            memory: For the copies; reused from an earlier image if none of its tensors is alive.
        """
        own = (*self.flats, *self.loose, *self.masters, *self.seen)
        copies = memory.tensors(
            {place: (tensor.numel(), tensor.dtype) for place, tensor in enumerate(own)}
        )
        made = [copies[place].view(tensor.shape) for place, tensor in enumerate(own)]
        staging.copy_to_host(made, own)
        rest = iter(made)

        def taken(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(itertools.islice(rest, len(tensors)))

        return replace(
            self,
            flats=taken(self.flats),
            loose=taken(self.loose),
            masters=taken(self.masters),
            seen=taken(self.seen),
        )

    def with_masters(self) -> ShardImage:
        """Return an image whose masters, and what is seen of them, are kinds of state."""
        if not self.masters and not self.seen:
            return self
        kinds, flats = list(self.kinds), list(self.flats)
        entries = {number: dict(values) for number, values in self.entries.items()}
        for name, tensors in ((MASTER_KIND, self.masters), (SEEN_KIND, self.seen)):
            for place, flat in enumerate(tensors):
                entry = InFlat(len(kinds))
                for span in self.plans[place].spans(self.rank):
                    entries.setdefault(span.number, {})[name] = entry
                kinds.append((place, name, flat.dtype))
                flats.append(flat)
        return replace(
            self, kinds=tuple(kinds), flats=tuple(flats), entries=entries, masters=(), seen=()
        )


def image_of(
    shards: Shards,
    flat: FlatState,
    state: State,
    unowned: StateByNumber,
    rank: int,
) -> ShardImage:
    """Return the image of a rank whose state is flat; its tensors are the optimizer's own.

    Args:
        state: The base optimizer's.
        unowned: State of parameters that no rank steps, by number.
    """
    loose = _LooseTensors()
    # One entry a kind: the garbage collector scans every tuple of an entry.
    places = {kind: InFlat(place) for place, kind in enumerate(flat.kinds)}
    entries: StateByNumber = {}
    for piece in shards.pieces:
        values = state.get(piece.tensor)
        if values is None:
            continue
        entries[piece.number] = {
            name: places[Kind(piece.home[0], name, value.dtype, value.device)]
            if piece.home is not None and flat.belongs(value, piece)
            else loose.entry(value)
            for name, value in values.items()
        }
    for number, kept in unowned.items():
        entries[number] = {name: loose.entry(value) for name, value in kept.items()}
    _copy_scalars(entries)
    return ShardImage(
        rank=rank,
        kinds=tuple((kind.buffer, kind.name, kind.dtype) for kind in flat.kinds),
        flats=tuple(flat.kinds.values()),
        loose=tuple(loose.tensors),
        entries=entries,
        masters=tuple(shards.masters.flats),
        seen=tuple(shards.seen()),
        plans=tuple(shards.plans),
        forms=tuple(
            torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta")
            for p in shards.parameters
        ),
    )


class _LooseTensors:
    """Tensors of an image outside the flat ones, in the order of their entries."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def entry(self, value: object) -> object:
        """Return the entry of a value: a copy of a number, a scalar tensor, else its place here."""
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        if value.dim() == 0:
            return value
        self.tensors.append(value.detach())
        return Loose(len(self.tensors) - 1)


def _copy_scalars(entries: StateByNumber) -> None:
    """Replace scalar tensors by copies in host memory; fused steps count on the device."""
    found = [
        (values, name, value)
        for values in entries.values()
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    ]
    copies = host_values.copies_of([value for _, _, value in found])
    for (values, name, _), value in zip(found, copies, strict=True):
        values[name] = value
