"""All-gather of the stepped shards into all ranks' parameters, in ``step`` or overlapped."""

from __future__ import annotations

from functools import partial

from mpidist.comm.group_types import Group
from mpidist.zero.overlap import Gather, PendingGathers
from mpidist.zero.shards import Shards
from mpidist.zero.wire import Wire


class ParameterGather:
    """The all-gather at the end of one optimizer's steps.

    Args:
        group: Native group.
        shards: The optimizer's.
        wire: Format of shards on the network; None: the parameters' own.
        overlaps: ``run`` returns before the shards have arrived.
        cap_bytes: Most bytes in one bucket of an overlapped gather.
        owner: The optimizer; held by a weak reference.

    Attributes:
        pending: Gathers that ``run`` has started.
    """

    def __init__(
        self,
        group: Group,
        shards: Shards,
        wire: Wire | None,
        overlaps: bool,
        cap_bytes: float,
        owner: object,
    ) -> None:
        self.pending = PendingGathers(owner)
        self._group = group
        self._shards = shards
        self._wire = wire
        self._overlaps = overlaps
        self._cap_bytes = cap_bytes

    def run(self, may_overlap: bool = True) -> None:
        """Copy the stepped shards to all ranks.

        Collective: over the group, after a barrier that follows every rank's step.

        Args:
            may_overlap: False in a callback of autograd: a function mode that the callback pushes
                onto torch's stack is gone after it.
        """
        group, shards, wire = self._group, self._shards, self._wire
        if group.size == 1:
            return
        # Ranks that share one copy on one node have nothing to copy.
        is_in_place = shards.buffers.is_one_copy and group.is_single_node
        if self._overlaps and may_overlap and not is_in_place:
            self._begin()
        elif wire is not None:
            buffers, masters = shards.buffers, shards.masters.flats
            for plan, flat, master in zip(buffers.plans, buffers.flats, masters, strict=True):
                wire.share(group, master, flat, plan.bounds)
            shards.masters.mark_current(shards.pieces)
        elif not is_in_place:
            shards.buffers.gather()

    def _begin(self) -> None:
        """Start the gathers, in the order of the group's operations. Collective: over the group."""
        shards, buffers = self._shards, self._shards.buffers
        if self._wire is None:
            gathers = buffers.gather_in_buckets(self._cap_bytes, shards.parameters)
        else:
            gathers = []
            masters = shards.masters.flats
            for plan, flat, master in zip(buffers.plans, buffers.flats, masters, strict=True):
                share = partial(self._wire.share, self._group, master, flat, plan.bounds)
                work = self._group.in_order(share, device=flat.device, operation="gather_shards")
                parameters = [shards.parameters[slot.number] for slot in plan.slots]
                gathers.append(Gather(parameters, [work]))
            shards.masters.mark_current(shards.pieces)
        self.pending.begin(gathers)
