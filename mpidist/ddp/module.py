"""``DistributedDataParallel``: a module whose gradients are averaged over all ranks of a group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from mpidist.ddp import plan
from mpidist.ddp.agreement import broadcast_state, require_equal_parameters
from mpidist.ddp.process_group import native_group
from mpidist.ddp.reducer import Hook, Reducer, Settings


class DistributedDataParallel(torch.nn.Module):
    """Average the gradients of ``module`` over all ranks of a group in each backward pass.

    Collective: constructed by all ranks of the group, which then run forward and backward the same number of times.

    Args:
        module: The module; its parameters on this rank's device.
        process_group: A native group, or a torch group on the backend ``mpidist``; all ranks of the job if None.
        bucket_cap_mb: MiB of gradients that travel together; 25, and less for the first bucket, if None.
        bucket_cap_mb_list: MiB of the first, the second, … bucket.
        most_buckets: Merge buckets until there are no more than these.
        forward_sync_buffers: Broadcast rank 0's buffers before each forward pass.
        init_sync: Verify shapes and dtypes on all ranks, then broadcast rank 0's parameters and buffers.
        find_unused_parameters: Parameters may lack a gradient, and not the same ones on all ranks.
        static_graph: Which parameters are used, and how often, never changes.
        gradient_as_bucket_view: Gradients are views of the buckets. torch's default is False.

    Raises:
        ValueError: No parameter requires a gradient.
        DisagreementError: Parameters differ in shape or dtype between ranks (on all ranks).

    Source:
        ``torch.nn.parallel.DistributedDataParallel``, whose names and meanings these are.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        bucket_cap_mb_list: Sequence[float] | None = None,
        most_buckets: int | None = None,
        forward_sync_buffers: bool = True,
        init_sync: bool = True,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
    ) -> None:
        super().__init__()
        self.module = module
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError("DistributedDataParallel needs a module with a parameter that requires a gradient")
        self.process_group = native_group(process_group)
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._syncs_buffers = forward_sync_buffers
        if init_sync:
            require_equal_parameters(self.process_group, named)
            broadcast_state(self.process_group, [*module.parameters(), *module.buffers()])
        settings = Settings(
            limits=plan.limits_of(bucket_cap_mb, bucket_cap_mb_list),
            most_buckets=most_buckets,
            gradient_as_bucket_view=gradient_as_bucket_view,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            in_line=self.process_group.is_single_node,
        )
        self.reducer = Reducer([p for _, p in named], [name for name, _ in named], self.process_group, settings)

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Have ``hook(state, bucket)`` reduce the buckets; again at any time between steps.

        Args:
            state: Passed to each call.
            hook: Gets a ``GradBucket`` and returns a future of the reduced buffer.

        Raises:
            TypeError: ``hook`` cannot be called.
        """
        if not callable(hook):
            raise TypeError(f"register_comm_hook needs a callable; got {type(hook).__name__}")
        self.reducer.register_hook(hook, state)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on each rank: forward passes in here are not averaged."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; under no_grad or no_sync nothing else happens."""
        is_averaged = torch.is_grad_enabled() and self.require_backward_grad_sync
        if is_averaged:
            self.reducer.rebuild()
        if self._syncs_buffers and self.require_forward_param_sync and self.require_backward_grad_sync:
            broadcast_state(self.process_group, list(self.module.buffers()))
        output = self.module(*args, **kwargs)
        if is_averaged:
            self.reducer.arm([leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad])
        return output
