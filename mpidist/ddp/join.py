"""Uneven inputs: a rank without inputs shadows the other ranks' collectives until all have ended.

Before each forward pass all ranks, including those without inputs, gather each rank's next action
(``next_iteration``). From the table a rank without inputs derives the collectives to shadow, and
every rank the number of ranks that share the average.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from mpidist.comm.algorithms.reduce_op import MAX
from mpidist.comm.group_types import Group
from mpidist.ddp.buffer_syncing import BufferSyncing
from mpidist.ddp.reducer import Reducer
from mpidist.ddp.verification import broadcast_state, named_state
from mpidist.dynamo import untraced
from mpidist.errors import DisagreementError

# Set on a module's parameters within ``join``. A sharded optimizer of them that was not passed to
# ``join`` would wait forever, and raises instead.
_IS_JOINING = "_mpidist_is_joining"
# The text of torch's Join, for which programs look.
SOMEONE_EXHAUSTED = (
    "Detected at least one rank that exhausted inputs. Throwing across all ranks: "
    "throw_on_early_termination is set"
)


@dataclass(frozen=True)
class Iteration:
    """One iteration of the ranks that have inputs.

    Attributes:
        members: Number of ranks with inputs.
        root: The highest of them, whose buffers are broadcast.
        averages: Gradients are averaged.
        syncs_buffers: Buffers are synchronized in the forward pass.
        optimizer: Number of the optimizer that steps, from 1; 0 for a forward pass.
    """

    members: int
    root: int
    averages: bool
    syncs_buffers: bool
    optimizer: int = 0


class JoinedOptimizer(Protocol):
    """A sharded optimizer that joins: a rank without inputs executes its steps."""

    before_step: Callable[[], object] | None

    def step_joined(self) -> None:
        """Execute a step of the ranks with inputs."""

    def end_joined(self) -> None:
        """End after the last step of the ranks with inputs."""


@untraced
def next_iteration(
    group: Group,
    has_inputs: bool,
    averages: bool = False,
    syncs_buffers: bool = False,
    optimizer: int = 0,
) -> Iteration:
    """Gather what each rank is about to do; return what the ranks with inputs do.

    Collective: over the group.

    Raises:
        DisagreementError: The ranks with inputs do not do the same (on all ranks).
    """
    own = torch.tensor(
        [has_inputs, averages, syncs_buffers, optimizer], dtype=torch.uint8, device="cpu"
    )
    table = torch.empty(group.size * 4, dtype=torch.uint8, device="cpu")
    group.all_gather_into_tensor(table, own)
    rows = [
        (rank, actions)
        for rank, (present, *actions) in enumerate(table.view(-1, 4).tolist())
        if present
    ]
    if not rows:
        return Iteration(0, -1, False, False)
    root, actions = rows[-1]
    other = next((rank for rank, others in rows if others != actions), None)
    if other is not None:
        raise DisagreementError(
            f"DistributedDataParallel.join: ranks {other} and {root} are in different passes or "
            "steps; no_sync, no_grad and buffers to synchronise must be the same on all ranks in "
            "one iteration"
        )
    return Iteration(len(rows), root, bool(actions[0]), bool(actions[1]), actions[2])


def last_joiner(group: Group, is_last: bool) -> int:
    """Return the highest rank that had inputs to the end. Collective: over the group."""
    root = torch.tensor([group.rank if is_last else -1], device="cpu")
    group.all_reduce(root, MAX)
    return int(root)


class UnevenInputs:
    """Uneven inputs of one data-parallel module.

    Args:
        module: The module within.
        ignored: Names of parameters and buffers that stay each rank's own.
        buffers: Synchronization of its buffers.

    Attributes:
        divides_by_initial: Gradients are divided by W; else by the number of ranks with inputs.
        authoritative_rank: The rank whose weights all ranks got at the end of the last ``join``.
    """

    def __init__(
        self, module: torch.nn.Module, ignored: Collection[str], buffers: BufferSyncing
    ) -> None:
        self.divides_by_initial = True
        self.authoritative_rank: int | None = None
        self._module = module
        self._ignored = ignored
        self._buffers = buffers
        self._is_joining = False
        self._throws = False

    def use(self, group: Group, reducer: Reducer) -> None:
        """Shadow the collectives of a group and a reducer from now on."""
        self._group = group
        self._reducer = reducer

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool,
        enable: bool,
        throw_on_early_termination: bool,
        optimizers: Sequence[JoinedOptimizer],
    ) -> Iterator[None]:
        """Run the loop over a rank's inputs; see ``DistributedDataParallel.join``."""
        self.divides_by_initial = divide_by_initial_world_size
        self._is_joining, self._throws = enable, throw_on_early_termination
        try:
            with self._shadowing(optimizers) if enable else contextlib.nullcontext():
                yield
        finally:
            self._is_joining = self._throws = False

    def announce(self, joinable: Joinable, averages: bool, syncs_buffers: bool) -> Iteration | None:
        """Announce a forward pass to the other ranks; None outside of ``join``.

        Args:
            joinable: The data-parallel module, for torch's ``Join``.
        """
        if not self._is_joining:
            if not joinable._join_config.enable:
                return None
            Join.notify_join_context(joinable)
        return _announce(self._group, self._throws, averages, syncs_buffers)

    def scale(self, iteration: Iteration | None) -> float:
        """Return the factor of the average over W ranks."""
        if iteration is None or self.divides_by_initial:
            return 1.0
        return self._group.size / iteration.members

    def shadow(self, iteration: Iteration) -> None:
        """Execute the collectives of one iteration of the ranks with inputs.

        Collective: over the group.
        """
        if iteration.syncs_buffers:
            self._buffers.sync(self._group, iteration.root)
        self._buffers.is_due = iteration.averages
        if iteration.averages:
            self._reducer.scale = self.scale(iteration)
            self._reducer.shadow()

    def end_shadowing(self, is_last: bool) -> None:
        """Replace parameters and buffers by those of a rank that had inputs to the end.

        Collective: over the group.

        Args:
            is_last: This rank is such a rank.
        """
        root = self.authoritative_rank = last_joiner(self._group, is_last)
        named = named_state(self._module, self._ignored, self._buffers.is_enabled)
        broadcast_state(self._group, [tensor for _, tensor in named], root)

    @contextlib.contextmanager
    def _shadowing(self, optimizers: Sequence[JoinedOptimizer]) -> Iterator[None]:
        """Shadow the other ranks behind this rank's loop, until their loops have ended."""
        group, throws = self._group, self._throws
        for number, optimizer in enumerate(optimizers, 1):
            optimizer.before_step = partial(_announce, group, throws, False, False, number)
        parameters = list(self._module.parameters())
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
            while (iteration := next_iteration(group, False)).members:
                is_last = False
                if throws:
                    raise RuntimeError(
                        f"Rank {group.rank} exhausted all inputs, and throw_on_early_termination "
                        "is set"
                    )
                if iteration.optimizer:
                    optimizers[iteration.optimizer - 1].step_joined()
                else:
                    self.shadow(iteration)
        finally:
            for optimizer in optimizers:
                optimizer.end_joined()
            self._reducer.end_shadowing()
        self.end_shadowing(is_last)


class TorchJoinHook(JoinHook):
    """Hook that torch's ``Join`` calls on a rank without inputs."""

    def __init__(self, uneven: UnevenInputs, group: Group, reducer: Reducer) -> None:
        self._uneven = uneven
        self._group = group
        self._reducer = reducer

    def main_hook(self) -> None:
        """Shadow one iteration."""
        self._uneven.shadow(next_iteration(self._group, False))

    def post_hook(self, is_last_joiner: bool) -> None:
        """Restore this rank's gradients; broadcast the weights of a rank with inputs to the end."""
        self._reducer.end_shadowing()
        self._uneven.end_shadowing(is_last_joiner)


def _announce(
    group: Group, throws: bool, averages: bool, syncs_buffers: bool, optimizer: int = 0
) -> Iteration:
    iteration = next_iteration(group, True, averages, syncs_buffers, optimizer)
    if throws and iteration.members < group.size:
        raise RuntimeError(SOMEONE_EXHAUSTED)
    return iteration
