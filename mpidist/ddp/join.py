"""Uneven inputs: a rank that has none left mirrors the collectives of those that go on, until all are done.

Before each forward pass every rank tells all what it is about to do (``exchange``), the ones
without inputs too; so they know which collectives to mirror, and how many ranks share the average.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms.join import JoinHook

from mpidist.comm.algorithms.reduce_op import MAX
from mpidist.dynamo import untraced
from mpidist.errors import DisagreementError

# Set on a module's parameters within ``join``: a sharded optimizer of them that was not named would
# wait for ever.
_IS_JOINING = "_mpidist_is_joining"
# The words of torch's Join, for which programs look.
SOMEONE_EXHAUSTED = (
    "Detected at least one rank that exhausted inputs. Throwing across all ranks: "
    "throw_on_early_termination is set"
)


@dataclass(frozen=True)
class Iteration:
    """What the ranks that have inputs do in one iteration.

    Attributes:
        members: How many they are.
        root: The last of them, whose buffers hold.
        averages: Whether gradients are averaged.
        syncs_buffers: Whether buffers are broadcast before the forward pass.
        optimizer: 0 for a forward pass; else it is a step, of the optimizer of this number, from 1.
    """

    members: int
    root: int
    averages: bool
    syncs_buffers: bool
    optimizer: int = 0


@untraced
def exchange(
    group: Any,
    has_inputs: bool,
    averages: bool = False,
    syncs_buffers: bool = False,
    optimizer: int = 0,
) -> Iteration:
    """Tell all ranks what this one is about to do, and learn the same of them.

    Collective: over the group.

    Raises:
        DisagreementError: On all ranks, if those with inputs do not do the same.
    """
    own = torch.tensor(
        [has_inputs, averages, syncs_buffers, optimizer], dtype=torch.uint8, device="cpu"
    )
    table = torch.empty(group.size * 4, dtype=torch.uint8, device="cpu")
    group.all_gather_into_tensor(table, own)
    rows = [
        (rank, plans)
        for rank, (present, *plans) in enumerate(table.view(-1, 4).tolist())
        if present
    ]
    if not rows:
        return Iteration(0, -1, False, False)
    root, plans = rows[-1]
    other = next((rank for rank, others in rows if others != plans), None)
    if other is not None:
        raise DisagreementError(
            f"DistributedDataParallel.join: ranks {other} and {root} are in different passes or "
            "steps; no_sync, no_grad and "
            "buffers to synchronise must be the same on all ranks in one iteration"
        )
    return Iteration(len(rows), root, bool(plans[0]), bool(plans[1]), plans[2])


@contextmanager
def joined(module: Any, group: Any, throws: bool, optimizers: Sequence[Any] = ()) -> Iterator[None]:
    """Run the loop over a rank's inputs, then mirror the other ranks' passes until all have ended theirs.

    Collective: entered and left by all ranks of the group.

    Args:
        module: Has ``parameters()``, ``shadow(iteration)``, ``end_shadowing()`` and
            ``broadcast_from(root)``.
        throws: Raise on all ranks as soon as the first has no inputs left.
        optimizers: Sharded ones on the same group: have ``before_step`` (called before each step),
            ``step_joined()`` and ``end_joined()``.
    """
    for number, optimizer in enumerate(optimizers, 1):
        optimizer.before_step = partial(_announce, group, number, throws)
    parameters = list(module.parameters())
    for parameter in parameters:
        setattr(parameter, _IS_JOINING, True)
    try:
        yield
    finally:
        for parameter in parameters:
            if hasattr(parameter, _IS_JOINING):
                delattr(parameter, _IS_JOINING)
        for optimizer in optimizers:
            optimizer.before_step = None
    is_last = True
    try:
        while (iteration := exchange(group, False)).members:
            is_last = False
            if throws:
                raise RuntimeError(
                    f"Rank {group.rank} exhausted all inputs, and throw_on_early_termination is set"
                )
            if iteration.optimizer:
                optimizers[iteration.optimizer - 1].step_joined()
            else:
                module.shadow(iteration)
    finally:
        for optimizer in optimizers:
            optimizer.end_joined()
        module.end_shadowing()
    module.broadcast_from(last_joiner(group, is_last))


def _announce(group: Any, optimizer: int, throws: bool) -> None:
    iteration = exchange(group, True, optimizer=optimizer)
    if throws and iteration.members < group.size:
        raise RuntimeError(SOMEONE_EXHAUSTED)


def last_joiner(group: Any, is_last: bool) -> int:
    """Return the highest rank that had inputs to the end. Collective: over the group."""
    root = torch.tensor([group.rank if is_last else -1], device="cpu")
    group.all_reduce(root, MAX)
    return int(root)


class TorchJoinHook(JoinHook):
    """What torch's ``Join`` calls on a rank without inputs."""

    def __init__(self, module: Any, group: Any) -> None:
        self._module = module
        self._group = group

    def main_hook(self) -> None:
        """Mirror one iteration."""
        self._module.shadow(exchange(self._group, False))

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give this rank its own gradients back, and all ranks the weights of one that had inputs to the end."""
        self._module.end_shadowing()
        self._module.broadcast_from(last_joiner(self._group, is_last_joiner))
