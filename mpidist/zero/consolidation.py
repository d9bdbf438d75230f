"""Consolidation of the ranks' state on one rank: raw memory in chunks, received in place.

First every rank sends the recipient its entries: for each parameter the names of its state, and
0-dim values (step counts). The recipient allocates one tensor for each kind of state and buffer, as
long as the buffer, and receives each rank's shard into it. Other ranks allocate at most one chunk.

Letters: W ranks; N elements of a buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch

from mpidist.comm.algorithms import staging
from mpidist.comm.consistency import raising_on_all
from mpidist.comm.group_types import Group
from mpidist.kernels.view import laid_out
from mpidist.zero.local_state import FLAT, LOOSE, Entry, described
from mpidist.zero.result_memory import KeptMemory
from mpidist.zero.shard_image import KindKey, ShardImage
from mpidist.zero.state_dict import StateByNumber

Tensor = torch.Tensor
CHUNK_BYTES = 16 << 20

# A rank's state as plain data: the kinds, the rows of each parameter (``local_state.described``),
# and the shapes and dtypes of the loose tensors.
_Contents: TypeAlias = tuple[
    tuple[KindKey, ...], dict[int, list[Entry]], list[tuple[torch.Size, torch.dtype]]
]
# A flat tensor's kind, or a rank and the place of one of its loose tensors.
_Part: TypeAlias = KindKey | tuple[int, int]


class Consolidation:
    """The last consolidated state of one optimizer, and its memory."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._memory = KeptMemory()
        self._state: StateByNumber | None = None
        self._recipient: int | None = None

    def result(self, rank: int) -> StateByNumber:
        """Return the state by parameter number.

        Raises:
            RuntimeError: This rank has no consolidated state.
        """
        if self._state is None:
            last = (
                "it was not called yet"
                if self._recipient is None
                else f"the last call sent it to rank {self._recipient}"
            )
            raise RuntimeError(
                f"the optimizer's state is not consolidated on rank {rank} ({last}): call "
                f"consolidate_state_dict(recipient_rank={rank}) on all ranks before state_dict() "
                "on this one"
            )
        return self._state

    def run(self, image: ShardImage, recipient: int, chunk_bytes: int) -> None:
        """Send all ranks' state to the recipient, or to all (-1). Collective: over the group."""
        # Freed first, so that the new result can reuse the memory.
        self._state = None
        self._recipient = recipient
        self._state = gathered(self._group, image, recipient, chunk_bytes, self._memory)


def gathered(
    group: Group, image: ShardImage, recipient: int, chunk_bytes: int, memory: KeptMemory
) -> StateByNumber | None:
    """Return all ranks' state by parameter number, in torch's shapes; None on other ranks.

    Collective: over the group.

    Args:
        image: This rank's.
        recipient: Rank in the group; -1 for all.
        chunk_bytes: Longest message.
        memory: Of the result.

    Raises:
        MemoryError: This recipient has no memory (DisagreementError on the other ranks).
    """
    everyone: list[_Contents] | None
    if recipient == -1:
        everyone = group.all_gather_object(_contents(image))
    else:
        everyone = group.gather_object(_contents(image), recipient)
    own = [*image.flats, *(tensor.reshape(-1) for tensor in image.loose)]
    # Before the first message: a rank must not send to a recipient without memory.
    with raising_on_all(group, "consolidation"):
        whole, loose = _allocated(everyone or [], image, memory)
    if everyone is None:
        for tensor in own:
            for chunk in _chunks(tensor, chunk_bytes):
                group.send(chunk, recipient)
        return None
    for rank, (kinds, _, _) in enumerate(everyone):
        places = [
            whole[kind][slice(*image.plans[kind[0]].bounds[rank : rank + 2])] for kind in kinds
        ] + loose[rank]
        if rank == group.rank:
            staging.copy_to_host(places, own)
        for place in places:
            for chunk in _chunks(place, chunk_bytes):
                if recipient == -1:
                    group.broadcast(chunk, rank)
                elif rank != group.rank:
                    group.recv(chunk, rank)
    return _assembled(everyone, whole, loose, image)


def _contents(image: ShardImage) -> _Contents:
    entries = {
        number: [described(name, value) for name, value in values.items()]
        for number, values in image.entries.items()
    }
    return image.kinds, entries, [(tensor.shape, tensor.dtype) for tensor in image.loose]


def _allocated(
    everyone: list[_Contents], image: ShardImage, memory: KeptMemory
) -> tuple[dict[_Part, Tensor], list[list[Tensor]]]:
    """Return a tensor of N elements for each kind, and each rank's loose tensors as vectors."""
    wanted: dict[_Part, tuple[int, torch.dtype]] = {}
    for rank, (kinds, _, shapes) in enumerate(everyone):
        for kind in kinds:
            wanted[kind] = (image.plans[kind[0]].numel, kind[2])
        for place, (shape, dtype) in enumerate(shapes):
            wanted[rank, place] = (shape.numel(), dtype)
    made = memory.tensors(wanted)
    loose = [
        [made.pop((rank, place)) for place in range(len(shapes))]
        for rank, (_, _, shapes) in enumerate(everyone)
    ]
    return made, loose


def _assembled(
    everyone: list[_Contents],
    whole: dict[_Part, Tensor],
    loose: list[list[Tensor]],
    image: ShardImage,
) -> StateByNumber:
    slots = {
        (place, slot.number): slot for place, plan in enumerate(image.plans) for slot in plan.slots
    }
    found: StateByNumber = {}
    for rank, (kinds, entries, shapes) in enumerate(everyone):
        for number, rows in entries.items():
            if number in found:  # a cut parameter: all its owners have equal entries
                continue
            values = found[number] = {}
            for name, where, value in rows:
                if where == FLAT:
                    slot = slots[kinds[value][0], number]
                    part = whole[kinds[value]][slot.offset : slot.offset + slot.numel]
                    values[name] = laid_out(part, image.forms[number])
                else:
                    values[name] = (
                        loose[rank][value].view(shapes[value][0]) if where == LOOSE else value
                    )
    return dict(sorted(found.items()))


def _chunks(flat: Tensor, chunk_bytes: int) -> Iterator[Tensor]:
    step = max(chunk_bytes // flat.element_size(), 1)
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step]
