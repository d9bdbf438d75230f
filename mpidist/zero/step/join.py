"""Uneven inputs: a rank without inputs steps its shard with the average gradients of the others.

``mpidist``'s DistributedDataParallel leaves that average in the gradients of such a rank. torch's
does not, so a rank with inputs sends the average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.algorithms.join import JoinHook

from mpidist.zero.shards import groups
from mpidist.zero.shards.groups import Groups
from mpidist.zero.shards.shards import Shards

Tensor = torch.Tensor

# Set on parameters by ``mpidist.ddp.shadowing`` while their gradients are the other ranks' average.
_IS_SHADOWING = "_mpidist_is_shadowing"


def is_shadowing(parameters: Sequence[Tensor]) -> bool:
    """Return whether this rank has no inputs, and its gradients are the other ranks' average."""
    return any(hasattr(parameter, _IS_SHADOWING) for parameter in parameters)


class UnevenInputs:
    """Steps of ranks of which some have no inputs left.

    Args:
        parameter_groups: Of all parameters.
        shards: The sharded optimizer's.
    """

    def __init__(self, parameter_groups: Groups, shards: Shards) -> None:
        self._groups = parameter_groups
        self._shards = shards
        self._own: list[tuple[Tensor, Tensor | None]] | None = None  # while others' are borrowed

    def exchange(self, has_inputs: bool) -> None:
        """Send gradients and settings from the last rank with inputs to the ranks without.

        The settings are those of a rank whose schedulers are still stepped.

        Collective: over the group.
        """
        group, parameters, owned = self._shards.group, self._shards.parameters, self._shards.owned()
        settings = [groups.settings(each) for each in self._groups]
        needs = not has_inputs and not is_shadowing(
            [parameters[number] for number in owned[group.rank]]
        )
        flags = torch.empty(2 * group.size, dtype=torch.uint8, device="cpu")
        group.all_gather_into_tensor(
            flags, torch.tensor([has_inputs, needs], dtype=torch.uint8, device="cpu")
        )
        rows = flags.view(-1, 2).tolist()
        roots = [rank for rank, (has, _) in enumerate(rows) if has]
        if not roots:
            return
        for rank, (has, wants) in enumerate(rows):
            if has:
                continue
            if group.rank == roots[-1]:
                group.send_object(
                    (
                        settings,
                        [_on_host(parameters[number].grad) for number in owned[rank]]
                        if wants
                        else None,
                    ),
                    rank,
                )
            elif group.rank == rank:
                (settings, gradients), _ = group.recv_object(roots[-1])
                if wants:
                    self._borrow([parameters[number] for number in owned[rank]], gradients)
        groups.sync(settings, self._groups)

    def restore(self) -> None:
        """Restore the parameters' own gradients."""
        for parameter, gradient in self._own or ():
            parameter.grad = gradient
        self._own = None

    def _borrow(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        if self._own is None:
            self._own = [(parameter, parameter.grad) for parameter in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)


def _on_host(gradient: Tensor | None) -> Tensor | None:
    # Objects sent as data hold tensors in host memory.
    return None if gradient is None else gradient.detach().cpu()


@dataclass
class StepHook(JoinHook):
    """Hook of torch's ``Join`` for a rank without inputs: takes the step of the other ranks."""

    step: Callable[[], None]
    end: Callable[[], None]  # restores this rank's own gradients

    def main_hook(self) -> None:
        """Take one step."""
        self.step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Restore this rank's own gradients."""
        self.end()
