"""Post-local SGD: gradients averaged over all ranks for some steps, then within a node.

A model averager then averages the parameters between the nodes.

Source: Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020 (arXiv
1808.07217); torch's ``post_localSGD_hook`` for names and meanings. torch's default subgroup is as
many consecutive ranks as a machine has devices; here it is the ranks that share a node's memory.
"""

from __future__ import annotations

import logging
import warnings

import torch

from mpidist.comm.group_types import AnyGroup, Group
from mpidist.comm.resolve_group import native_group
from mpidist.ddp.grad_bucket import GradBucket
from mpidist.ddp.hooks.default import average
from mpidist.ddp.hooks.stages import in_order
from mpidist.ddp.settings_checks import require_int
from mpidist.future import Future, completed

_log = logging.getLogger(__name__)


class PostLocalSGDState:
    """Settings of post-local SGD and its number of steps.

    A saved or copied state has no groups; a loaded one has the default groups.

    Args:
        process_group: All ranks: a group of mpidist, or None for the default.
        subgroup: The ranks that average gradients afterwards; None for those on this node, a group
            that is constructed at the first step that needs it.
        start_localSGD_iter: Steps of averaging over ``process_group`` before; equal to the
            averager's ``warmup_steps``.
        post_local_gradient_allreduce: False: no gradients are averaged afterwards, not even within
            ``subgroup``.

    Attributes:
        iter: Steps so far, counted up to ``start_localSGD_iter``, as in torch.

    Raises:
        TypeError: A group is of another backend, or the number of steps is no int.
        ValueError: The number of steps is negative, or the subgroup lacks this rank or has ranks
            outside of ``process_group``.
    """

    def __init__(
        self,
        process_group: AnyGroup,
        subgroup: AnyGroup,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        require_int("start_localSGD_iter", start_localSGD_iter, least=0)
        if process_group is not None or subgroup is not None:
            whole = native_group(process_group)
            part = whole if subgroup is None else native_group(subgroup)
            outside = sorted(set(part.world_ranks) - set(whole.world_ranks))
            if outside:
                raise ValueError(
                    f"subgroup must be some of process_group's ranks; ranks {outside} of the job "
                    "are not"
                )
        self.process_group = process_group
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count a step at its last bucket."""
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_localSGD_iter:
                _log.info("local SGD begins after %d steps", self.iter)

    def local_group(self) -> Group:
        """Return the native group of the ranks that average gradients after the start.

        Collective: the first call, over ``process_group``.
        """
        whole = native_group(self.process_group)
        if self.subgroup is None:
            # On one node the subgroup is all ranks, whose gradients lie in shared memory.
            self.subgroup = self.process_group if whole.is_single_node else whole.split_by_node()
        return native_group(self.subgroup)

    def __getstate__(self) -> dict[str, object]:
        """Return all attributes but the groups."""
        if self.process_group is not None or self.subgroup is not None:
            warnings.warn("a PostLocalSGDState is saved or copied without its groups", stacklevel=2)
        return {**self.__dict__, "process_group": None, "subgroup": None}


@in_order
def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the bucket over all ranks for ``start_localSGD_iter`` steps, then within the node.

    From then on ``PeriodicModelAverager`` or ``HierarchicalModelAverager`` averages the parameters
    after the optimizer's step.
    """
    if state.iter < state.start_localSGD_iter:
        state.maybe_increase_iter(bucket)
        return average(native_group(state.process_group), bucket.buffer(), bucket.node_tensor())
    if not state.post_local_gradient_allreduce:
        return completed(bucket.buffer())
    return average(state.local_group(), bucket.buffer(), bucket.node_tensor())
