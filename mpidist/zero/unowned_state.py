"""State that was loaded for parameters that no rank steps: each is kept whole by one rank, until the parameter gets a place.

Where parameters are cut or have master copies, one that was frozen from the beginning has no piece.
Its state must not be lost at the next save.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mpidist.zero import state_dict
from mpidist.zero.shards import Shards


class UnownedState:
    """State without a piece.

    Attributes:
        owners: For each number whose state is parked the rank that keeps it; the same on all ranks.
        held: What this rank keeps, by number and name.
    """

    def __init__(
        self,
        owners: Mapping[int, int] | None = None,
        held: Mapping[int, dict[str, Any]] | None = None,
    ) -> None:
        self.owners = dict(owners or {})
        self.held = dict(held or {})

    def hand_over(self, group: Any, shards: Shards, state: Any) -> bool:
        """Give the pieces that parameters have got by now their part of what was parked.

        Collective: over the group.

        Args:
            state: The base optimizer's; gets the values as they were loaded.

        Returns:
            Whether there was any, on all ranks alike.
        """
        placed = shards.numbers()
        found = [number for number in sorted(self.owners) if number in placed]
        for number in found:
            held = group.broadcast_object(self.held.pop(number, None), self.owners.pop(number))
            for piece in shards.pieces:
                if piece.number == number:
                    state[piece.tensor] = {
                        name: state_dict.part(value, piece) for name, value in held.items()
                    }
        return bool(found)


def unowned_part(given: Mapping[int, dict[str, Any]], shards: Shards, rank: int) -> UnownedState:
    """Return what of a loaded state no rank steps.

    Args:
        given: State by parameter number, of all ranks alike.
        rank: This one, which copies what it is to keep.
    """
    if shards.steps_parameters:
        return UnownedState()
    placed = shards.numbers()
    owners = {number: shards.owners[number] for number in given if number not in placed}
    held = {number: _copied(given[number]) for number, owner in owners.items() if owner == rank}
    return UnownedState(owners, held)


def _copied(held: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
        for name, value in held.items()
    }
