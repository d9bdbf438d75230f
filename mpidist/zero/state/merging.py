"""Merge of all ranks' rank-local state dicts into torch's format (pure), for another layout.

Nothing is copied but what several ranks own: state that one rank owns whole is a view of its flat
tensor, so a state dict mapped from a file is read only when needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mpidist.kernels.view import laid_out
from mpidist.zero.shards.buffer_plan import BufferPlan
from mpidist.zero.state.rank_local import RankLocalState, is_rank_local, state_of
from mpidist.zero.state.shard_state import InFlat, KindKey, StateByNumber
from mpidist.zero.state.state_dict import assembled

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
    ranks = [state_of(state) for state in states]
    flats = [dict(zip(state.kinds, state.flats, strict=True)) for state in ranks]
    plans, forms = ranks[0].plans, ranks[0].forms
    found: StateByNumber = {}
    for state in ranks:
        for number, entries in state.entries.items():
            if number in found:  # a cut parameter: all its owners have equal entries
                continue
            values = found[number] = {}
            for name, value in entries.items():
                if isinstance(value, InFlat):
                    kind = state.kinds[value.kind]
                    plan = plans[kind[0]]
                    whole = _elements(kind, [own.get(kind) for own in flats], plan, number)
                    values[name] = laid_out(whole, forms[number])
                else:
                    values[name] = value
    return assembled(dict(sorted(found.items())), states[0]["param_groups"])


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
    kind: KindKey, flats: Sequence[Tensor | None], plan: BufferPlan, number: int
) -> Tensor:
    """Return a parameter's elements of one kind of state, from their owners.

    Args:
        flats: Each rank's tensor of the kind.
        plan: Of the flat buffer.
    """
    parts, bounds = [], plan.bounds
    _, offset, numel = plan.by_number[number]
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
