"""Sharded optimizer with torch's names, and torch's hooks for steps within the backward pass.

Source: ``torch.distributed.optim.ZeroRedundancyOptimizer`` and ``ddp_zero_hook`` of torch's
communication hooks, with the same names and meanings. torch's hooks do not step in the first two or
three iterations; these step in all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from mpidist.comm.group_types import AnyGroup
from mpidist.zero.optimizer import OSS
from mpidist.zero.shards.partition import BALANCED
from mpidist.zero.state.consolidation import CHUNK_BYTES
from mpidist.zero.step.backward_steps import Hook, SteppingHook

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT


class ZeroRedundancyOptimizer(OSS):
    """``OSS`` with torch's arguments, and its partition: in each group the largest parameter first.

    Collective: over the group; see ``OSS``, whose other keyword arguments are valid too.

    Args:
        params: Parameters, named parameters or groups.
        optimizer_class: Class of the base optimizer.
        process_group: torch group on the backend ``mpidist``, or native group; the default group if
            None.
        parameters_as_bucket_view: Has no effect: parameters are always views of flat buffers.
        overlap_with_ddp: The step is taken in the backward pass of DistributedDataParallel, by
            ``hook_with_zero_step``.
        **defaults: Further arguments of ``OSS`` and of ``optimizer_class``.

    Raises:
        TypeError: ``params`` is a tensor, no iterable, or mixed.
        ValueError: It is empty, or holds sparse parameters.
        DisagreementError: Another rank refused its arguments.
    """

    def __init__(
        self,
        params: ParamsT,
        optimizer_class: type[torch.optim.Optimizer],
        process_group: AnyGroup = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        if "partition" not in defaults:
            defaults.update(partition=BALANCED, cost=defaults.get("cost", torch.numel))
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self._overlap_with_ddp = overlap_with_ddp
        # Checked when OSS iterates over them, where it reports errors to all ranks. OSS itself
        # refuses a tensor.
        checked = params if isinstance(params, torch.Tensor) else _checked(params)
        super().__init__(checked, optimizer_class, process_group, **defaults)

    @property
    def process_group(self) -> AnyGroup:
        """Return the group, as it was given, or the default one."""
        return self.join_process_group

    def consolidate_state_dict(self, to: int = 0, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Send all ranks' state to the rank ``to``; see ``OSS.consolidate_state_dict``.

        Collective: over the group.
        """
        super().consolidate_state_dict(to, chunk_bytes=chunk_bytes)


def hook_with_zero_step(
    hook: Hook, ddp: torch.nn.Module, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> SteppingHook:
    """Return ``hook`` with the step of ``zero``: each bucket is stepped once it is averaged.

    The end of each averaged backward pass gathers the shards; a training loop calls no ``step()``.

    Args:
        hook: Reduces a bucket.
        ddp: The module on which the hook is to be registered; torch's or ours.
        zero: Constructed with ``overlap_with_ddp=True``.
        shard_buckets: Has no effect: ``zero``'s partition decides which rank steps a parameter.

    Raises:
        ValueError: ``zero`` was constructed without ``overlap_with_ddp=True``.
    """
    if not getattr(zero, "_overlap_with_ddp", False):
        raise ValueError(
            "hook_with_zero_step needs a ZeroRedundancyOptimizer that was constructed with "
            "overlap_with_ddp=True"
        )
    stepping = zero.stepping_hook(hook)
    zero.complete_after(ddp)
    return stepping


# Averages and steps are always interleaved.
hook_with_zero_step_interleaved = hook_with_zero_step


def _checked(params: ParamsT) -> Iterator[Any]:
    """Yield parameters with the checks of torch's class, made at the first one."""
    try:
        found = list(params)
    except TypeError as error:
        raise TypeError(
            f"params must be an iterable of tensors or dicts; got {torch.typename(params)}"
        ) from error
    if not found:
        raise ValueError("ZeroRedundancyOptimizer got an empty parameter list")
    kinds = {
        next((kind for kind in (dict, torch.Tensor) if isinstance(each, kind)), type(each))
        for each in found
    }
    if len(kinds) > 1 or kinds.isdisjoint({dict, torch.Tensor, tuple}):
        raise TypeError(
            "params must be an iterable of tensors, of (name, tensor) pairs or of dicts; got "
            + ", ".join(sorted(kind.__name__ for kind in kinds))
        )
    yield from found
