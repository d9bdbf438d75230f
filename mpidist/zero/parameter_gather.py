"""All-gather of the stepped shards into all ranks' parameters, at the end of a step."""

from __future__ import annotations

from mpidist.comm.group_types import Group
from mpidist.zero.shards import Shards
from mpidist.zero.wire import Wire


def gather_parameters(group: Group, shards: Shards, wire: Wire | None) -> None:
    """Copy the stepped shards to all ranks.

    Collective: over the group, after a barrier that follows every rank's step.

    Blocks: until this rank's parameters are complete.

    Args:
        group: Native group.
        shards: The optimizer's.
        wire: Format of shards on the network; None: the parameters' own.
    """
    if group.size == 1:
        return
    if wire is not None:
        masters = shards.masters.flats
        for plan, flat, master in zip(shards.plans, shards.flats, masters, strict=True):
            wire.share(group, master, flat, plan.bounds)
        shards.masters.mark_current(shards.pieces)
    elif not (shards.is_one_copy and group.is_single_node):
        # Ranks that share one copy on one node have nothing to copy.
        shards.gather()
