"""Gradient scaler for sharded gradients: an infinite gradient on one rank skips the step on all.

With ``to_owners`` each rank has only the averages that it owns, so the ranks reduce their results.

Source: ``ShardedGradScaler`` of FairScale and of ``torch.distributed.fsdp``.
"""

from __future__ import annotations

import torch

from mpidist.comm.algorithms.reduce_op import MAX
from mpidist.comm.consistency import require_same
from mpidist.comm.group_types import AnyGroup
from mpidist.comm.world_group import native_group

Tensor = torch.Tensor


class ShardedGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for gradients that are divided among ranks.

    ``unscale_`` and ``step`` are collective over the optimizer's group (an ``OSS``'s own, else
    ``process_group``); all ranks then step or skip together, and their scales stay equal.

    The other arguments are those of torch's class.

    Args:
        enabled: False: gradients are not scaled, and nothing is communicated.
        process_group: For optimizers that have none: native group or torch group on the backend
            ``mpidist``; the default group if None.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        process_group: AnyGroup = None,
    ) -> None:
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self.process_group = process_group

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = {}
        error: Exception | None = None
        try:
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        except Exception as raised:
            error = raised
        group = native_group(getattr(optimizer, "group", self.process_group))
        worst = max((float(each) for each in found.values()), default=0.0)
        flags = torch.tensor(
            [worst, bool(found), error is not None], dtype=torch.float32, device="cpu"
        )
        group.all_reduce(flags, MAX)
        is_infinite, has_gradients, is_refused = flags.tolist()
        if is_refused:
            require_same(group, "ShardedGradScaler.unscale_", (), error)
        if has_gradients:
            # A rank without any gradient also skips with the others.
            found[inv_scale.device] = torch.full(
                (), is_infinite, dtype=torch.float32, device=inv_scale.device
            )
        return found

    def __getstate__(self) -> dict[str, object]:
        """Leave out the group: a copy's is the default one."""
        return {**super().__getstate__(), "process_group": None}
