"""Consolidation of the ranks' state on one rank: raw memory in chunks, received in place.

First every rank sends the recipient its entries: for each parameter the names of its state, and
0-dim values (step counts). Parameters with equal names and places share one pattern, so that the
entries of N parameters are a few lists, not N containers, which Python's garbage collector would
scan again and again. The recipient allocates one tensor for each kind of state and buffer, as
long as the buffer, and receives each rank's shard into it. Other ranks allocate at most one chunk.

Letters: W ranks; N elements of a buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import torch

from mpidist.comm.algorithms import staging
from mpidist.comm.consistency import raising_on_all
from mpidist.comm.group_types import Group
from mpidist.kernels.view import laid_out
from mpidist.zero.local_state import FLAT, LOOSE, VALUE
from mpidist.zero.result_memory import KeptMemory
from mpidist.zero.shard_image import InFlat, KindKey, Loose, ShardImage
from mpidist.zero.state_dict import ParamState, StateByNumber

Tensor = torch.Tensor
CHUNK_BYTES = 16 << 20

# State of one parameter: for each name the kind of its place (``local_state``), and of a flat place
# the kind of state; -1 of others, which are taken from the front of their list.
_Pattern: TypeAlias = tuple[tuple[str, str, int], ...]
# A flat tensor's kind, or a rank and the place of one of its loose tensors.
_Part: TypeAlias = KindKey | tuple[int, int]


class _Contents(NamedTuple):
    """State of a rank as plain data.

    Attributes:
        kinds: Of the flat tensors.
        patterns: The different ones.
        numbers: Of the parameters.
        pattern_of: The index of each parameter's pattern.
        loose: Shapes and dtypes of the loose tensors, in the order of the parameters' entries.
        values: The other values, in the order of the parameters' entries.
    """

    kinds: tuple[KindKey, ...]
    patterns: list[_Pattern]
    numbers: list[int]
    pattern_of: list[int]
    loose: list[tuple[torch.Size, torch.dtype]]
    values: list[object]


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
    sent = tuple(_contents(image))
    gathered_rows = (
        group.all_gather_object(sent) if recipient == -1 else group.gather_object(sent, recipient)
    )
    del sent
    everyone = None if gathered_rows is None else [_Contents(*row) for row in gathered_rows]
    own = [*image.flats, *(tensor.reshape(-1) for tensor in image.loose)]
    # Before the first message: a rank must not send to a recipient without memory.
    with raising_on_all(group, "consolidation"):
        whole, loose = _allocated(everyone or [], image, memory)
    if everyone is None:
        for tensor in own:
            for chunk in _chunks(tensor, chunk_bytes):
                group.send(chunk, recipient)
        return None
    for rank, contents in enumerate(everyone):
        places = [
            whole[kind][slice(*image.plans[kind[0]].bounds[rank : rank + 2])]
            for kind in contents.kinds
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
    patterns: dict[_Pattern, int] = {}
    pattern_of: list[int] = []
    loose: list[tuple[torch.Size, torch.dtype]] = []
    others: list[object] = []
    for values in image.entries.values():
        rows = []
        for name, value in values.items():
            if isinstance(value, InFlat):
                rows.append((name, FLAT, value.kind))
            elif isinstance(value, Loose):
                rows.append((name, LOOSE, -1))
                loose.append((image.loose[value.place].shape, image.loose[value.place].dtype))
            else:
                rows.append((name, VALUE, -1))
                others.append(value)
        pattern_of.append(patterns.setdefault(tuple(rows), len(patterns)))
    return _Contents(image.kinds, list(patterns), list(image.entries), pattern_of, loose, others)


def _allocated(
    everyone: list[_Contents], image: ShardImage, memory: KeptMemory
) -> tuple[dict[_Part, Tensor], list[list[Tensor]]]:
    """Return a tensor of N elements for each kind, and each rank's loose tensors as vectors."""
    wanted: dict[_Part, tuple[int, torch.dtype]] = {}
    for rank, contents in enumerate(everyone):
        for kind in contents.kinds:
            wanted[kind] = (image.plans[kind[0]].numel, kind[2])
        for place, (shape, dtype) in enumerate(contents.loose):
            wanted[rank, place] = (shape.numel(), dtype)
    made = memory.tensors(wanted)
    loose = [
        [made.pop((rank, place)) for place in range(len(contents.loose))]
        for rank, contents in enumerate(everyone)
    ]
    return made, loose


def _assembled(
    everyone: list[_Contents],
    whole: dict[_Part, Tensor],
    loose: list[list[Tensor]],
    image: ShardImage,
) -> StateByNumber:
    slots = [{slot.number: slot for slot in plan.slots} for plan in image.plans]
    found: StateByNumber = {}
    for contents, vectors in zip(everyone, loose, strict=True):
        others = iter(contents.values)
        tensors = zip(vectors, contents.loose, strict=True)
        for number, index in zip(contents.numbers, contents.pattern_of, strict=True):
            values: ParamState = {}
            for name, where, place in contents.patterns[index]:
                if where == FLAT:
                    kind = contents.kinds[place]
                    slot = slots[kind[0]][number]
                    part = whole[kind][slot.offset : slot.offset + slot.numel]
                    values[name] = laid_out(part, image.forms[number])
                elif where == LOOSE:
                    vector, (shape, _) = next(tensors)
                    values[name] = vector.view(shape)
                else:
                    values[name] = next(others)
            # A cut parameter: all its owners have equal entries.
            found.setdefault(number, values)
    return {number: found[number] for number in sorted(found)}


def _chunks(flat: Tensor, chunk_bytes: int) -> Iterator[Tensor]:
    step = max(chunk_bytes // flat.element_size(), 1)
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step]
