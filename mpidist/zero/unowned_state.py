"""Loaded state of parameters that no rank steps; one rank keeps it until the parameter has a place.

Where parameters are cut or have master copies, a parameter frozen from the beginning has no piece.
Its state must not be lost at the next save.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import torch

from mpidist.comm.group_types import Group
from mpidist.comm.memory import host_values
from mpidist.zero import state_dict
from mpidist.zero.shards import Shards
from mpidist.zero.state_dict import ParamState, StateByNumber


class UnownedState:
    """State without a piece.

    Attributes:
        owners: The rank that keeps the state of each parameter, by number; equal on all ranks.
        held: The state that this rank keeps, by number and name.
    """

    def __init__(
        self,
        owners: Mapping[int, int] | None = None,
        held: Mapping[int, ParamState] | None = None,
    ) -> None:
        self.owners = dict(owners or {})
        self.held = dict(held or {})

    def hand_over(
        self, group: Group, shards: Shards, state: MutableMapping[torch.Tensor, ParamState]
    ) -> bool:
        """Move the state of parameters that now have a place to their pieces.

        Collective: over the group.

        Args:
            state: The base optimizer's; gets the values as they were loaded.

        Returns:
            Whether state was moved, equal on all ranks.
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


def unowned_part(given: StateByNumber, shards: Shards, rank: int) -> UnownedState:
    """Return the part of a loaded state whose parameters no rank steps.

    Args:
        given: State by parameter number, equal on all ranks.
        rank: This rank, which copies the state that it keeps.
    """
    if shards.steps_parameters:
        return UnownedState()
    placed = shards.numbers()
    owners = {number: shards.owners[number] for number in given if number not in placed}
    held = {number: _copied(given[number]) for number, owner in owners.items() if owner == rank}
    return UnownedState(owners, held)


def _copied(held: ParamState) -> ParamState:
    return {
        name: host_values.copy_of(value) if isinstance(value, torch.Tensor) else value
        for name, value in held.items()
    }
