"""Consolidation of the ranks' state: raw memory in chunks, straight into the recipient's tensors.

First every rank tells the recipient what it holds: for each parameter the names of its state, and what lies in no flat tensor
(step counts, factored moments). The recipient then has one tensor for each kind of state and buffer, as long as the buffer, and
receives each rank's shard into its place. A rank that receives nothing allocates at most one chunk.

Letters: W ranks; N elements of a buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from mpidist.zero.buffer_plan import BufferPlan
from mpidist.zero.flat_buffers import laid_out
from mpidist.zero.flat_state import FlatState, Kind, State
from mpidist.zero.fresh_memory import KeptMemory
from mpidist.zero.shards import Shards

Tensor = torch.Tensor
CHUNK_BYTES = 16 << 20

_Kind = tuple[int, str, torch.dtype]  # without the device: consolidated state lies in host memory
_Told = tuple[list[_Kind], dict[int, dict[str, Any]]]  # this rank's kinds; by number and name: InFlat, or a value


class InFlat(NamedTuple):
    """Stands for a value that lies in a flat tensor: the place of its kind among those that the same rank tells."""

    kind: int


class Consolidation:
    """The last consolidated state of one optimizer, and the memory that it lies in."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._memory = KeptMemory()
        self._state: dict[int, dict[str, Any]] | None = None
        self._recipient: int | None = None

    def result(self, rank: int) -> dict[int, dict[str, Any]]:
        """Return the state by parameter number.

        Raises:
            RuntimeError: There is none on this rank.
        """
        if self._state is None:
            last = "it was not called yet" if self._recipient is None else f"the last call brought it to rank {self._recipient}"
            raise RuntimeError(
                f"the optimizer's state is not consolidated on rank {rank} ({last}): call consolidate_state_dict(recipient_rank="
                f"{rank}) on all ranks before state_dict() on this one"
            )
        return self._state

    def run(self, shards: Shards, flat: FlatState, state: State, recipient: int, chunk_bytes: int) -> None:
        """Bring all ranks' state to the recipient, or to all (-1). Collective: over the group."""
        group = self._group
        self._state, self._recipient = None, recipient
        receives = recipient in (-1, group.rank)
        kinds = list(flat.kinds)
        own = [(kind.buffer, kind.name, kind.dtype) for kind in kinds]
        told = (own, _described(shards, kinds, flat, state))
        everyone: list[_Told] | None
        if recipient == -1:
            everyone = group.all_gather_object(told)
        else:
            everyone = group.gather_object(told, recipient)
        if not receives or everyone is None:
            for kind in kinds:
                for chunk in _chunks(flat.kinds[kind], chunk_bytes):
                    group.send(chunk, recipient)
            return
        whole = self._allocated(everyone, shards.plans)
        for kind, place in zip(kinds, own, strict=True):
            low, high = shards.plans[kind.buffer].bounds[group.rank : group.rank + 2]
            whole[place][low:high].copy_(flat.kinds[kind])
        for rank in range(group.size):
            for place in everyone[rank][0]:
                low, high = shards.plans[place[0]].bounds[rank : rank + 2]
                for chunk in _chunks(whole[place][low:high], chunk_bytes):
                    if recipient == -1:
                        group.broadcast(chunk, rank)
                    elif rank != group.rank:
                        group.recv(chunk, rank)
        self._state = _assembled(everyone, whole, shards)

    def _allocated(self, everyone: list[_Told], plans: list[BufferPlan]) -> dict[_Kind, Tensor]:
        places = dict.fromkeys(place for kinds, _ in everyone for place in kinds)
        return self._memory.tensors({place: (plans[place[0]].numel, place[2]) for place in places})


def _described(shards: Shards, kinds: list[Kind], flat: FlatState, state: State) -> dict[int, dict[str, Any]]:
    """Return this rank's part of the answer to what each parameter has."""
    places = {kind: place for place, kind in enumerate(kinds)}
    told: dict[int, dict[str, Any]] = {}
    for piece in shards.pieces:
        held = state.get(piece.tensor)
        if held is None:
            continue
        entries: dict[str, Any] = {}
        for name, value in held.items():
            if flat.belongs(piece, value):
                assert piece.home is not None
                entries[name] = InFlat(places[Kind(piece.home[0], name, value.dtype, value.device)])
            else:
                entries[name] = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
        told[piece.number] = entries
    return told


def _assembled(everyone: list[_Told], whole: dict[_Kind, Tensor], shards: Shards) -> dict[int, dict[str, Any]]:
    """Return torch's state: by number, in the parameters' shapes."""
    found: dict[int, dict[str, Any]] = {}
    for kinds, entries in everyone:
        for number, names in entries.items():
            if number not in found:
                found[number] = {
                    name: _view(whole, kinds[value.kind], number, shards) if isinstance(value, InFlat) else value
                    for name, value in names.items()
                }
    return dict(sorted(found.items()))


def _view(whole: dict[_Kind, Tensor], place: _Kind, number: int, shards: Shards) -> Tensor:
    slot = shards.slot(place[0], number)
    return laid_out(whole[place][slot.offset : slot.offset + slot.numel], shards.parameters[number])


def _chunks(flat: Tensor, chunk_bytes: int) -> Iterator[Tensor]:
    step = max(chunk_bytes // flat.element_size(), 1)
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step]
