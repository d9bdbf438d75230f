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
from mpidist.comm.consistency import comparing, raising_on_all
from mpidist.comm.group_types import Group
from mpidist.kernels.view import laid_out
from mpidist.zero.state.flat_state import ParamState
from mpidist.zero.state.result_memory import KeptMemory
from mpidist.zero.state.shard_state import InFlat, KindKey, ShardState, StateByNumber, is_outside

Tensor = torch.Tensor
CHUNK_BYTES = 16 << 20

# State of one parameter: for each name the number of its flat tensor's kind. Other tensors and
# values are taken from the front of their list.
_Pattern: TypeAlias = tuple[tuple[str, int], ...]
_LOOSE, _VALUE = -1, -2
# A flat tensor's kind, or a rank and the index of one of its tensors that are not flat.
_Part: TypeAlias = KindKey | tuple[int, int]


class _Contents(NamedTuple):
    """State of a rank as plain data.

    Attributes:
        kinds: Of the flat tensors.
        patterns: The different ones.
        numbers: Of the parameters.
        pattern_of: The index of each parameter's pattern.
        loose: Shapes and dtypes of the tensors that are not flat, in the entries' order.
        values: The other values, in the entries' order.
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

    def run(self, state: ShardState, recipient: int, chunk_bytes: int) -> None:
        """Send all ranks' state to the recipient, or to all (-1). Collective: over the group."""
        # Freed first, so that the new result can reuse the memory.
        self._state = None
        self._recipient = recipient
        self._state = gathered(self._group, state, recipient, chunk_bytes, self._memory)


def require_recipient(group: Group, where: str, recipient: object, chunk_bytes: int) -> None:
    """Refuse arguments that are wrong, or differ between ranks. Collective: over the group.

    Args:
        where: The method, for messages.

    Raises:
        ValueError: On the rank that gave a wrong one.
        DisagreementError: On the others.
    """
    with comparing(group, where) as rows:
        if (
            isinstance(recipient, bool)
            or not isinstance(recipient, int)
            or not -1 <= recipient < group.size
        ):
            raise ValueError(
                f"recipient_rank is a rank from 0 to {group.size - 1}, or -1 for all; got "
                f"{recipient!r}"
            )
        if chunk_bytes < 1:
            raise ValueError(f"chunk_bytes must be positive; got {chunk_bytes}")
        rows += [("recipient_rank", recipient), ("chunk_bytes", chunk_bytes)]


def gathered(
    group: Group, state: ShardState, recipient: int, chunk_bytes: int, memory: KeptMemory
) -> StateByNumber | None:
    """Return all ranks' state by parameter number, in torch's shapes; None on other ranks.

    Collective: over the group.

    Args:
        state: This rank's.
        recipient: Rank in the group; -1 for all.
        chunk_bytes: Longest message.
        memory: Of the result.

    Raises:
        MemoryError: This recipient has no memory (DisagreementError on the other ranks).
    """
    sent = tuple(_contents(state))
    gathered_rows = (
        group.all_gather_object(sent) if recipient == -1 else group.gather_object(sent, recipient)
    )
    del sent
    everyone = None if gathered_rows is None else [_Contents(*row) for row in gathered_rows]
    own = [*state.flats, *(tensor.reshape(-1) for *_, tensor in state.outside())]
    # Before the first message: a rank must not send to a recipient without memory.
    with raising_on_all(group, "consolidation"):
        whole, loose = _allocated(everyone or [], state, memory)
    if everyone is None:
        for tensor in own:
            for chunk in _chunks(tensor, chunk_bytes):
                group.send(chunk, recipient)
        return None
    for rank, contents in enumerate(everyone):
        targets = [
            whole[kind][slice(*state.plans[kind[0]].bounds[rank : rank + 2])]
            for kind in contents.kinds
        ] + loose[rank]
        if rank == group.rank:
            staging.copy_to_host(targets, own)
        for target in targets:
            for chunk in _chunks(target, chunk_bytes):
                if recipient == -1:
                    group.broadcast(chunk, rank)
                elif rank != group.rank:
                    group.recv(chunk, rank)
    return _assembled(everyone, whole, loose, state)


def _contents(state: ShardState) -> _Contents:
    patterns: dict[_Pattern, int] = {}
    pattern_of: list[int] = []
    loose: list[tuple[torch.Size, torch.dtype]] = []
    others: list[object] = []
    for values in state.entries.values():
        rows = []
        for name, value in values.items():
            if isinstance(value, InFlat):
                rows.append((name, value.kind))
            elif is_outside(value):
                rows.append((name, _LOOSE))
                loose.append((value.shape, value.dtype))
            else:
                rows.append((name, _VALUE))
                others.append(value)
        pattern_of.append(patterns.setdefault(tuple(rows), len(patterns)))
    return _Contents(state.kinds, list(patterns), list(state.entries), pattern_of, loose, others)


def _allocated(
    everyone: list[_Contents], state: ShardState, memory: KeptMemory
) -> tuple[dict[_Part, Tensor], list[list[Tensor]]]:
    """Return a tensor of N elements for each kind, and each rank's other tensors as vectors."""
    wanted: dict[_Part, tuple[int, torch.dtype]] = {}
    for rank, contents in enumerate(everyone):
        for kind in contents.kinds:
            wanted[kind] = (state.plans[kind[0]].numel, kind[2])
        for index, (shape, dtype) in enumerate(contents.loose):
            wanted[rank, index] = (shape.numel(), dtype)
    made = memory.tensors(wanted)
    loose = [
        [made.pop((rank, index)) for index in range(len(contents.loose))]
        for rank, contents in enumerate(everyone)
    ]
    return made, loose


def _assembled(
    everyone: list[_Contents],
    whole: dict[_Part, Tensor],
    loose: list[list[Tensor]],
    state: ShardState,
) -> StateByNumber:
    found: StateByNumber = {}
    for contents, vectors in zip(everyone, loose, strict=True):
        others = iter(contents.values)
        tensors = zip(vectors, contents.loose, strict=True)
        for number, index in zip(contents.numbers, contents.pattern_of, strict=True):
            values: ParamState = {}
            for name, kind_index in contents.patterns[index]:
                if kind_index >= 0:
                    kind = contents.kinds[kind_index]
                    slot = state.plans[kind[0]].by_number[number]
                    part = whole[kind][slot.offset : slot.offset + slot.numel]
                    values[name] = laid_out(part, state.forms[number])
                elif kind_index == _LOOSE:
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
