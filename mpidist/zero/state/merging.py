"""Merge of all ranks' rank-local state dicts into torch's format (pure), for another layout.

State that one rank owns whole is a view of its flat tensor, so a state dict mapped from a file is
read only when needed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from mpidist.kernels.view import laid_out
from mpidist.zero.state.rank_local import FLAT, LOOSE, Layout, RankLocalState, is_rank_local
from mpidist.zero.state.shard_state import KindKey, StateByNumber
from mpidist.zero.state.state_dict import MASTER, MASTERS, SEEN

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict

Tensor = torch.Tensor


def merged(states: Sequence[RankLocalState]) -> StateDict:
    """Return the state of one optimizer over all parameters, with a wire's master copies.

    Args:
        states: The ``rank_local_state_dict`` of each rank, by rank.

    Raises:
        ValueError: The states are not those of all ranks of one optimizer.
    """
    _require_of_one(states)
    layout = states[0]["layout"]
    slots = {
        (place, number): (offset, numel)
        for place, (_, held, _) in enumerate(layout["plans"])
        for number, offset, numel in held
    }
    places = [{kind: place for place, kind in enumerate(state["kinds"])} for state in states]
    found: StateByNumber = {}
    for state in states:
        for number, rows in state["entries"].items():
            if number in found:  # a cut parameter: all its owners have equal entries
                continue
            values = found[number] = {}
            for name, where, value in rows:
                if where == FLAT:
                    kind = state["kinds"][value]
                    flats = [
                        state["flats"][place[kind]] if kind in place else None
                        for state, place in zip(states, places, strict=True)
                    ]
                    flat = _elements(states, kind, flats, *slots[kind[0], number])
                    values[name] = _formed(flat, layout, number)
                else:
                    values[name] = state["loose"][value] if where == LOOSE else copy.copy(value)
    result = {
        "state": dict(sorted(found.items())),
        "param_groups": copy.deepcopy(states[0]["param_groups"]),
    }
    masters = _masters(states, slots)
    return {**result, MASTERS: masters} if masters else result


def _masters(
    states: Sequence[RankLocalState], slots: Mapping[tuple[int, int], tuple[int, int]]
) -> StateByNumber:
    """Return the masters by number, and what was seen beside them if all states hold it."""
    layout = states[0]["layout"]
    found: StateByNumber = {}
    for name, held in (
        (MASTER, [state["masters"] for state in states]),
        (SEEN, [state.get("seen", []) for state in states]),
    ):
        if not all(held):
            continue
        for (place, number), (offset, numel) in sorted(slots.items(), key=lambda row: row[0][1]):
            flats = [own[place] if place < len(own) else None for own in held]
            kind = (place, name, held[0][0].dtype)
            flat = _elements(states, kind, flats, offset, numel)
            found.setdefault(number, {})[name] = _formed(flat, layout, number)
    return found


def _formed(flat: Tensor, layout: Layout, number: int) -> Tensor:
    shape, strides = layout["shapes"][number], layout["strides"][number]
    return laid_out(flat, torch.empty_strided(shape, strides, device="meta"))


def _require_of_one(states: Sequence[RankLocalState]) -> None:
    if not states or not all(map(is_rank_local, states)):
        raise ValueError("the rank-local state dicts of all ranks are needed; at least one is none")
    ranks = [(state["rank"], state["world_size"]) for state in states]
    if ranks != [(rank, len(states)) for rank in range(len(states))]:
        words = ", ".join(f"{rank} of {size}" for rank, size in ranks)
        raise ValueError(
            f"the rank-local state dicts must be those of ranks 0 to {len(states) - 1} of "
            f"{len(states)}; got {words}"
        )
    if any(state["layout"] != states[0]["layout"] for state in states):
        raise ValueError(
            "the rank-local state dicts are of different layouts, not of one optimizer"
        )


def _elements(
    states: Sequence[RankLocalState],
    kind: KindKey,
    flats: Sequence[Tensor | None],
    offset: int,
    numel: int,
) -> Tensor:
    """Return ``numel`` elements of a flat buffer's state from ``offset`` on, from their owners."""
    bounds = states[0]["layout"]["plans"][kind[0]][2]
    parts = []
    for rank, flat in enumerate(flats):
        first, end = max(offset, bounds[rank]), min(offset + numel, bounds[rank + 1])
        if first >= end:
            continue
        if flat is None or flat.numel() != bounds[rank + 1] - bounds[rank]:
            raise ValueError(
                f"the rank-local state dict of rank {rank} is damaged: it lacks elements of "
                f"{kind[1]}"
            )
        parts.append(flat[first - bounds[rank] : end - bounds[rank]])
    if not parts:  # a parameter without elements
        return torch.empty(0, dtype=kind[2])
    return parts[0] if len(parts) == 1 else torch.cat(parts)
