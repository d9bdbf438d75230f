"""Post-local SGD: gradients are averaged over all ranks for some steps, then within a node; a model averager joins the nodes.

Source: Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020 (arXiv
1808.07217); names and meanings of torch's ``post_localSGD_hook``. Where torch's default subgroup is
as many consecutive ranks as a machine has devices, ours is the ranks that share a node's memory.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch

from mpidist.comm.resolve_group import native_group
from mpidist.ddp.bucket import GradBucket
from mpidist.ddp.hooks.default import average
from mpidist.ddp.hooks.stages import in_order
from mpidist.ddp.settings_checks import require_int
from mpidist.future import Future, completed

_log = logging.getLogger(__name__)


class PostLocalSGDState:
    """Settings of post-local SGD and its count of steps.

    Saved or copied it leaves its groups out; loaded, it has the default ones.

    Args:
        process_group: All ranks: a group of mpidist, or None for the default.
        subgroup: The ranks that go on averaging gradients; None for those on this node, a group
            that is made at the first step that needs it.
        start_localSGD_iter: Steps of averaging over ``process_group`` before; the averager's
            ``warmup_steps``.
        post_local_gradient_allreduce: False: no gradients are averaged afterwards, not even within
            ``subgroup``.

    Attributes:
        iter: Steps so far, counted up to ``start_localSGD_iter``, as in torch.

    Raises:
        TypeError: A group of another backend, or a number of steps that is no int.
        ValueError: A negative number of steps, or a subgroup without this rank or with ranks that
            ``process_group`` lacks.
    """

    def __init__(
        self,
        process_group: Any,
        subgroup: Any,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        require_int("start_localSGD_iter", start_localSGD_iter, least=0)
        if process_group is not None or subgroup is not None:
            whole = native_group(process_group)
            part = whole if subgroup is None else native_group(subgroup)
            strangers = sorted(set(part.world_ranks) - set(whole.world_ranks))
            if strangers:
                raise ValueError(
                    f"subgroup must be some of process_group's ranks; ranks {strangers} of the job "
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

    def local_group(self) -> Any:
        """Return the native group of the ranks that go on averaging gradients.

        Collective: the first call, over ``process_group``.
        """
        whole = native_group(self.process_group)
        if self.subgroup is None:
            # On one node it is all ranks, whose gradients lie in memory that they share.
            self.subgroup = self.process_group if whole.is_single_node else whole.split_by_node()
        return native_group(self.subgroup)

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the groups."""
        if self.process_group is not None or self.subgroup is not None:
            warnings.warn("a PostLocalSGDState is saved or copied without its groups", stacklevel=2)
        return {**self.__dict__, "process_group": None, "subgroup": None}


@in_order
def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the bucket over all ranks until ``start_localSGD_iter`` steps are done, then over this node's.

    From then on ``PeriodicModelAverager`` or ``HierarchicalModelAverager`` averages the parameters
    after the optimizer's step.
    """
    if state.iter < state.start_localSGD_iter:
        state.maybe_increase_iter(bucket)
        return average(native_group(state.process_group), bucket.buffer(), bucket.node_tensor())
    if not state.post_local_gradient_allreduce:
        return completed(bucket.buffer())
    return average(state.local_group(), bucket.buffer(), bucket.node_tensor())
