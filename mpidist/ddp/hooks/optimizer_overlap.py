"""Optimizer that steps a bucket's parameters within the hook, as soon as the bucket is averaged.

Source: ``torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks``, for its private
names. The public way is ``torch.distributed.optim._apply_optimizer_in_backward``, which
DistributedDataParallel supports without a hook.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from mpidist.ddp.hooks.grad_bucket import GradBucket
from mpidist.ddp.hooks.stages import BucketFuture, Hook, applied, future_of, is_in_order
from mpidist.ddp.hooks.torch_bucket import name_of, on_either_module

Tensor = torch.Tensor


class StepsOneParameter(Protocol):
    """One of torch's functional optimizers, as a hook uses it."""

    def step_param(self, param: Tensor, grad: Tensor | None) -> object:
        """Step one parameter."""


class OptimizerHookState:
    """Optimizer of a hook, and its parameters.

    Args:
        functional_optim: An object with ``step_param(parameter, gradient)``, such as torch's
            functional optimizers.
        params: The parameters to step; None for all.

    Raises:
        ValueError: ``functional_optim`` has no ``step_param``.
    """

    def __init__(
        self, functional_optim: StepsOneParameter, params: Iterable[Tensor] | None = None
    ) -> None:
        if not hasattr(functional_optim, "step_param"):
            raise ValueError(
                "a hook's optimizer must implement step_param; got "
                f"{type(functional_optim).__name__}"
            )
        self.functional_optimizer = functional_optim
        self.params_to_optimize = None if params is None else set(params)


class hook_then_optimizer:
    """A hook followed by the optimizer's step.

    Args:
        hook: The hook that averages.
        optimizer_state: An ``OptimizerHookState``.
    """

    def __init__(self, hook: Hook, optimizer_state: OptimizerHookState) -> None:
        self.hook = hook
        self.optimizer_state = optimizer_state
        # torch's DDP reads a hook's name.
        self.__name__ = self.__qualname__ = f"{name_of(hook)} then optimizer"

    @property
    def is_in_order(self) -> bool:
        """Return whether the wrapped hook keeps the order of collectives."""
        return is_in_order(self.hook)

    @on_either_module
    def __call__(self, state: object, bucket: GradBucket) -> BucketFuture:
        """Average the bucket, then step its parameters."""
        buffer = bucket.buffer()

        def step(result: Tensor) -> Tensor:
            if result.data_ptr() != buffer.data_ptr():
                buffer.copy_(result.view(-1))
            chosen = getattr(self.optimizer_state, "params_to_optimize", None)
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if chosen is None or parameter in chosen:
                    self.optimizer_state.functional_optimizer.step_param(parameter, gradient)
            return buffer

        return future_of(self.hook(state, bucket)).then(applied(step, buffer.numel()))
