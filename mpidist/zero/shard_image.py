"""State of one rank as data: flat tensors, the rest by parameter, and the layout that both have.

An image either refers to the optimizer's own tensors (valid until the next step) or holds copies,
for readers that work while training goes on.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from mpidist.zero.buffer_plan import BufferPlan
from mpidist.zero.flat_state import FlatState, Kind, State
from mpidist.zero.result_memory import KeptMemory
from mpidist.zero.shards import Shards

Tensor = torch.Tensor

# flat buffer, name, dtype; without the device, which differs between ranks
KindKey = tuple[int, str, torch.dtype]


class InFlat(NamedTuple):
    """Stands for a value that lies in a flat tensor: the place of its kind among those of the same image."""

    kind: int


class Loose(NamedTuple):
    """Stands for a tensor that lies in no flat one: its place among the loose tensors of the same image."""

    place: int


@dataclass(frozen=True)
class ShardImage:
    """What one rank holds.

    Attributes:
        rank: Of the holder.
        kinds: Of the flat tensors.
        flats: For each kind its tensor, as long as the rank's shard of the buffer.
        loose: Tensors of at least one dimension that lie in no flat one: factored moments, state
            without a piece.
        entries: For each parameter number and name of its state: InFlat, Loose, or the value.
        masters: For each flat buffer the rank's full-precision shard; empty if its parameters are
            stepped themselves.
        plans: Of the flat buffers.
        forms: For each parameter a tensor on the meta device with its shape and strides.
    """

    rank: int
    kinds: tuple[KindKey, ...]
    flats: tuple[Tensor, ...]
    loose: tuple[Tensor, ...]
    entries: dict[int, dict[str, Any]]
    masters: tuple[Tensor, ...]
    plans: tuple[BufferPlan, ...]
    forms: tuple[Tensor, ...]

    def copied(self, memory: KeptMemory) -> ShardImage:
        """Return an image of copies in host memory.

        Args:
            memory: Takes the copies; memory of an earlier image that nobody holds is used again.
        """
        own = (*self.flats, *self.loose, *self.masters)
        copies = memory.tensors(
            {place: (tensor.numel(), tensor.dtype) for place, tensor in enumerate(own)}
        )
        for place, tensor in enumerate(own):
            copies[place] = copies[place].view(tensor.shape).copy_(tensor)
        made = [copies[place] for place in range(len(own))]
        flats, loose = len(self.flats), len(self.loose)
        return replace(
            self,
            flats=tuple(made[:flats]),
            loose=tuple(made[flats : flats + loose]),
            masters=tuple(made[flats + loose :]),
        )

    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(tensor.nbytes for tensor in (*self.flats, *self.loose, *self.masters))


def image_of(
    shards: Shards,
    flat: FlatState,
    state: State,
    unowned: Mapping[int, Mapping[str, Any]],
    rank: int,
) -> ShardImage:
    """Describe a settled rank; its tensors are the optimizer's own.

    Args:
        state: The base optimizer's.
        unowned: State of parameters that no rank steps, by number.
    """
    kinds = list(flat.kinds)
    places = {kind: place for place, kind in enumerate(kinds)}
    loose: list[Tensor] = []

    def described(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        if value.dim() == 0:
            return value.detach().cpu().clone()
        loose.append(value.detach())
        return Loose(len(loose) - 1)

    entries: dict[int, dict[str, Any]] = {}
    for piece in shards.pieces:
        held = state.get(piece.tensor)
        if held is None:
            continue
        entries[piece.number] = {
            name: InFlat(places[Kind(piece.home[0], name, value.dtype, value.device)])
            if piece.home is not None and flat.belongs(piece, value)
            else described(value)
            for name, value in held.items()
        }
    for number, values in unowned.items():
        entries[number] = {name: described(value) for name, value in values.items()}
    forms = tuple(
        torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta")
        for p in shards.parameters
    )
    return ShardImage(
        rank,
        tuple((kind.buffer, kind.name, kind.dtype) for kind in kinds),
        tuple(flat.kinds.values()),
        tuple(loose),
        entries,
        tuple(shards.masters.flats),
        tuple(shards.buffers.plans),
        forms,
    )
