"""Inner optimizer of outer steps: its state, and the replica of the module that it steps.

A replica is held by one rank, or by the ranks whose gradients a ``DistributedDataParallel``
averages in each inner step, and which may share the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from mpidist import state_scalars
from mpidist.comm.consistency import raising_on_all
from mpidist.comm.group_types import Group
from mpidist.comm.world_group import native_group

Optimizer = torch.optim.Optimizer


class InnerOptimizer:
    """Inner optimizer on this rank.

    Args:
        optimizer: Steps the module.
        module: Bare or wrapped.
        group: Of the outer steps.

    Attributes:
        optimizer: As given.
        replica: Ranks in ``group`` that take the same inner steps.
        is_sharded: These ranks share the state (``mpidist.optim.OSS``).

    Raises:
        ValueError: A sharded optimizer has one copy of the parameters for a node, is of ranks
            outside of the group, or of others than the module averages gradients over.
    """

    def __init__(self, optimizer: Optimizer, module: torch.nn.Module, group: Group) -> None:
        # A sharded one has more methods than torch's class.
        self.optimizer: Any = optimizer
        self.is_sharded = is_sharded(optimizer)
        averaging = _gradient_ranks(module) or [group.world_ranks[group.rank]]
        if self.is_sharded:
            averaging = _sharing_ranks(optimizer, averaging, group)
        places = {rank: place for place, rank in enumerate(group.world_ranks)}
        self.replica = [places[rank] for rank in averaging if rank in places]

    def agreeing(self) -> AbstractContextManager[None]:
        """Return a context whose error is raised on all ranks that share the state."""
        if not self.is_sharded:
            return nullcontext()
        return raising_on_all(self.optimizer.group, "DiLoCo.load_state_dict")

    def state(self) -> Any:
        """Return the optimizer's state, or this rank's shard of it; tensors are not copied."""
        if not self.is_sharded:
            return self.optimizer.state_dict()
        return self.optimizer.rank_local_state_dict(copies=False)

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what ``state`` returned, or the whole state.

        Collective: over the ranks that share the state.
        """
        if self.is_sharded:
            self.optimizer.load_state_dict(dict(state))
        else:
            state_scalars.load(self.optimizer, dict(state))


def _sharing_ranks(shards: Any, averaging: list[int], group: Group) -> list[int]:
    """Return the job's ranks that share an optimizer's state, in the order of its group.

    Args:
        averaging: The job's ranks that average gradients.

    Raises:
        ValueError: They do not have equal parameters and gradients.
    """
    if shards.one_copy:
        raise ValueError(
            "inner has one copy of the parameters for each node (one_copy=True), to which each "
            "rank would apply the outer step: construct it without"
        )
    ranks: list[int] = list(shards.group.world_ranks)
    if not set(ranks) <= set(group.world_ranks):
        raise ValueError(
            f"inner is sharded over ranks {ranks} of the job, and process_group is of "
            f"{list(group.world_ranks)}: it must hold them all"
        )
    if set(averaging) != set(ranks):
        raise ValueError(
            f"inner is sharded over ranks {ranks} of the job, which must have equal gradients in "
            f"each step, and module averages them over {averaging}: give a DistributedDataParallel "
            "over the same ranks as module, or an inner optimizer that is not sharded"
        )
    return ranks


def is_sharded(optimizer: object) -> bool:
    """Return whether an optimizer's state is divided among ranks."""
    # By its method, not its class: a wrapper may delegate to the sharded optimizer.
    return hasattr(optimizer, "rank_local_state_dict")


def _gradient_ranks(module: torch.nn.Module) -> list[int]:
    """Return the job's ranks over which a module averages gradients; empty for a bare module."""
    wrapper = getattr(module, "_orig_mod", module)  # of torch.compile
    if not hasattr(wrapper, "process_group"):
        return []
    averaging: Any = wrapper.process_group
    # torch's DistributedDataParallel may be on another backend.
    if isinstance(averaging, dist.ProcessGroup):
        return dist.get_process_group_ranks(averaging)
    return list(native_group(averaging).world_ranks)
