"""Uneven inputs: a rank without inputs shadows the other ranks' collectives until all have ended.

Before each forward pass all ranks, including those without inputs, gather each rank's next action
(``exchange``). From the table a rank without inputs derives the collectives to shadow, and every
rank the number of ranks that share the average.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from mpidist.comm.algorithms.reduce_op import MAX
from mpidist.comm.group_types import AnyGroup, Group
from mpidist.ddp.buffer_syncing import BufferSyncing
from mpidist.ddp.verification import broadcast_state
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
def exchange(
    group: Group,
    has_inputs: bool,
    averages: bool = False,
    syncs_buffers: bool = False,
    optimizer: int = 0,
) -> Iteration:
    """Exchange what each rank is about to do; return what the ranks with inputs do.

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


@contextlib.contextmanager
def joined(
    module: UnevenInputs, group: Group, throws: bool, optimizers: Sequence[JoinedOptimizer] = ()
) -> Iterator[None]:
    """Run the loop over a rank's inputs, then shadow the other ranks until their loops have ended.

    Collective: entered and left by all ranks of the group.

    Args:
        throws: Raise on all ranks as soon as the first has no inputs left.
        optimizers: Sharded optimizers on the same group, with ``before_step`` (called before each
            step), ``step_joined()`` and ``end_joined()``.
    """
    for number, optimizer in enumerate(optimizers, 1):
        optimizer.before_step = partial(_announce, group, throws, False, False, number)
    parameters = list(module.module.parameters())
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


def _announce(
    group: Group, throws: bool, averages: bool, syncs_buffers: bool, optimizer: int = 0
) -> Iteration:
    iteration = exchange(group, True, averages, syncs_buffers, optimizer)
    if throws and iteration.members < group.size:
        raise RuntimeError(SOMEONE_EXHAUSTED)
    return iteration


def last_joiner(group: Group, is_last: bool) -> int:
    """Return the highest rank that had inputs to the end. Collective: over the group."""
    root = torch.tensor([group.rank if is_last else -1], device="cpu")
    group.all_reduce(root, MAX)
    return int(root)


class UnevenInputs(BufferSyncing, Joinable):
    """The part of a data-parallel module that shadows collectives of the ranks with inputs."""

    # Defined by the class that this one is mixed into.
    process_group: AnyGroup
    device: torch.device
    _state: Callable[[bool], list[tuple[str, torch.Tensor]]]

    _is_joining = False
    _throws_on_join = False
    _divides_by_initial = True

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        optimizers: Sequence[JoinedOptimizer] = (),
    ) -> Iterator[None]:
        """Train on uneven inputs: a rank whose loop has ended shadows the others' collectives.

        At the end all ranks have the weights of a rank that had inputs to the end.

        Collective: entered and left by all ranks of the group. Collectives of the user, and of
        modules such as SyncBatchNorm, are not shadowed.

        Args:
            divide_by_initial_world_size: Divide gradients by W, so that each input has the same
                weight; else by the number of ranks with inputs. A communication hook applies its
                own divisor.
            enable: False does nothing, for inputs that are known to be even.
            throw_on_early_termination: Raise on all ranks when the first has no inputs left.
            optimizers: Sharded optimizers on the same group, in one order on all ranks; a rank
                whose loop has ended executes their steps, too.

        Raises:
            RuntimeError: A rank has no inputs left, with ``throw_on_early_termination``.
            DisagreementError: The ranks are in different passes (one under no_sync or no_grad).
        """
        self._divides_by_initial = divide_by_initial_world_size
        self._is_joining, self._throws_on_join = enable, throw_on_early_termination
        try:
            throws = throw_on_early_termination
            with (
                joined(self, self._group, throws, optimizers)
                if enable
                else contextlib.nullcontext()
            ):
                yield
        finally:
            self._is_joining = self._throws_on_join = False

    def shadow(self, iteration: Iteration) -> None:
        """Execute the collectives of one iteration of the ranks with inputs.

        Collective: over the group.
        """
        if iteration.syncs_buffers:
            self._sync_buffers(iteration.root, waits=not iteration.averages)
        self.require_forward_param_sync = iteration.averages
        if iteration.averages:
            self.reducer.scale = self._scale(iteration)
            self.reducer.shadow()

    def end_shadowing(self) -> None:
        """Restore this rank's gradients of the time before it shadowed."""
        self.reducer.end_shadowing()

    def broadcast_from(self, root: int) -> None:
        """Replace parameters and buffers by ``root``'s. Collective: over the group."""
        self._authoritative_rank = root
        tensors = [tensor for _, tensor in self._state(self.forward_sync_buffers)]
        broadcast_state(self._group, tensors, root)

    def _exchange(self, averages: bool, syncs_buffers: bool) -> Iteration | None:
        """Announce a forward pass to the other ranks; None outside of ``join``."""
        if not self._is_joining:
            if not self._join_config.enable:
                return None
            Join.notify_join_context(self)
        return _announce(self._group, self._throws_on_join, averages, syncs_buffers)

    def _scale(self, iteration: Iteration | None) -> float:
        """Return the factor of the average over W ranks."""
        if iteration is None or self._divides_by_initial:
            return 1.0
        return self._group.size / iteration.members

    # --- torch's Join ---

    def join_hook(self, **kwargs: object) -> TorchJoinHook:
        """Return the hook that torch's ``Join`` runs on a rank without inputs; see ``join``."""
        self._divides_by_initial = bool(kwargs.get("divide_by_initial_world_size", True))
        return TorchJoinHook(self, self._group)

    @property
    def join_device(self) -> torch.device:
        """Return the device of torch's ``Join`` for its own collectives."""
        return self.device

    @property
    def join_process_group(self) -> AnyGroup:
        """Return the group of torch's ``Join`` for its own collectives."""
        return self.process_group


class TorchJoinHook(JoinHook):
    """Hook that torch's ``Join`` calls on a rank without inputs."""

    def __init__(self, module: UnevenInputs, group: Group) -> None:
        self._module = module
        self._group = group

    def main_hook(self) -> None:
        """Shadow one iteration."""
        self._module.shadow(exchange(self._group, False))

    def post_hook(self, is_last_joiner: bool) -> None:
        """Restore this rank's gradients; broadcast the weights of a rank with inputs to the end."""
        self._module.end_shadowing()
        self._module.broadcast_from(last_joiner(self._group, is_last_joiner))
