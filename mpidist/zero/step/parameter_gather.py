"""All-gather of the stepped shards into all ranks' parameters, at the end of a step."""

from __future__ import annotations

from mpidist.comm.group_types import Group
from mpidist.zero.shards.shards import Shards
from mpidist.zero.wire.wire import Wire


class ParameterGather:
    """All-gather of all shards, by memory that a node's ranks share or by a wire.

    Args:
        group: Native group.
        shards: The optimizer's.
        wire: Format of shards on the network; None: the parameters' own.
    """

    def __init__(self, group: Group, shards: Shards, wire: Wire | None) -> None:
        self._group = group
        self._shards = shards
        self._wire = wire

    def run(self) -> None:
        """Copy the stepped shards to all ranks.

        Collective: over the group, after a barrier that follows every rank's step.

        Blocks: until this rank's parameters are complete.
        """
        group, shards, wire = self._group, self._shards, self._wire
        if group.size == 1:
            return
        if wire is not None:
            masters = shards.masters
            for plan, flat, own in zip(shards.plans, shards.flats, masters.flats, strict=True):
                wire.share(group, own, flat, plan.bounds)
            masters.mark_current(shards.pieces)
        # Ranks that share one copy on one node have nothing to copy.
        elif not (shards.is_one_copy and group.is_single_node):
            shards.gather()
