"""Policy of the sharded optimizer's steps: who takes them, in ``step`` or in the backward pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable

from mpidist.zero.shards.groups import Groups
from mpidist.zero.shards.shards import Shards
from mpidist.zero.step.backward_steps import BackwardEndHook, BackwardSteps, Hook, SteppingHook
from mpidist.zero.step.join import UnevenInputs

# Set on parameters by ``mpidist.ddp.join`` within ``DistributedDataParallel.join``.
_IS_JOINING = "_mpidist_is_joining"


class StepPolicy:
    """Steps of one sharded optimizer: at the user's call, in the backward pass, or in a join.

    A stepping hook steps its buckets, and ``step()`` the rest. After ``complete_after`` the end of
    each backward pass calls ``step()``, and the user's calls do nothing.

    Args:
        parameter_groups: Of all parameters.
        shards: The sharded optimizer's.
        optim: The base optimizer.
    """

    def __init__(
        self, parameter_groups: Groups, shards: Shards, optim: torch.optim.Optimizer
    ) -> None:
        self._completes_backward = False  # from ``complete_after`` on
        self._is_joined = False  # during the call of a rank without inputs
        self._groups = parameter_groups
        self._optim = optim
        self._make_backward_steps = partial(BackwardSteps, parameter_groups, shards, optim)
        self._backward_steps: BackwardSteps | None = None  # from the first stepping hook on
        self._inputs = UnevenInputs(parameter_groups, shards)

    def enters(self, optimizer: Joinable, before_step: Callable[[], object] | None) -> bool:
        """Prepare this rank for a step; return False if the backward pass takes the step.

        Collective: over the group, where ranks may have no inputs.

        Args:
            optimizer: The sharded optimizer.
            before_step: As its attribute.

        Raises:
            RuntimeError: The parameters' module is within ``DistributedDataParallel.join``, which
                was not given the optimizer: ranks without inputs would not take part in the step.
        """
        if self._is_joined:
            self._inputs.exchange(has_inputs=False)
            return True
        steps = self._backward_steps
        # At the end of a backward pass its buckets have begun the step.
        if self._completes_backward and steps is not None and not steps.has_begun:
            warnings.warn(
                "step() does nothing: the backward pass takes the step (hook_with_zero_step)",
                stacklevel=4,
            )
            return False
        if before_step is not None:
            before_step()
        else:
            for group in self._groups:
                if group["params"] and hasattr(group["params"][0], _IS_JOINING):
                    raise RuntimeError(
                        "a sharded optimizer steps within DistributedDataParallel.join, which was "
                        "not given it; ranks without inputs could not take part: pass "
                        "join(optimizers=[optimizer])"
                    )
            Join.notify_join_context(optimizer)
        if before_step is not None or optimizer._join_config.enable:
            self._inputs.exchange(has_inputs=True)
        return True

    def step(self, **kwargs: Any) -> Any:
        """Step this rank's pieces, but those that the backward pass has stepped.

        Args:
            **kwargs: For the base optimizer.

        Returns:
            The result of the base optimizer.
        """
        if self._backward_steps is None:
            return self._optim.step(**kwargs)
        return self._backward_steps.step_rest(**kwargs)

    # --- steps within the backward pass ---

    def stepping_hook(self, hook: Hook) -> SteppingHook:
        """Return a communication hook that runs ``hook``, then steps its bucket."""
        if self._backward_steps is None:
            self._backward_steps = self._make_backward_steps()
        return SteppingHook(hook, self._backward_steps)

    def complete_after(self, module: torch.nn.Module, step: Callable[[], object]) -> None:
        """Call ``step`` at the end of each backward pass of ``module`` that averages."""
        self._completes_backward = True
        module.register_forward_hook(BackwardEndHook(partial(self._complete, step)))

    def _complete(self, step: Callable[[], object]) -> None:
        if self._backward_steps is not None and self._backward_steps.has_begun:
            step()

    def refusal(self) -> Exception | None:
        """Return the error of a step with a closure, or None."""
        if self._backward_steps is not None:
            return RuntimeError(
                "a closure cannot be used with steps within the backward pass: it would run after "
                "the step"
            )
        return None

    def require_unstepped(self, operation: str, reason: str) -> None:
        """Refuse an operation on gradients where the backward pass has used them.

        Raises:
            RuntimeError: There is a stepping hook.
        """
        if self._backward_steps is not None:
            raise RuntimeError(
                f"{operation} cannot be used with steps within the backward pass: {reason}"
            )

    # --- uneven inputs ---

    def step_joined(self, step: Callable[[], object]) -> None:
        """Call ``step`` as a rank without inputs. Collective: over the group."""
        self._is_joined = True
        try:
            step()
        finally:
            self._is_joined = False

    def end_joined(self) -> None:
        """Restore this rank's own gradients."""
        self._inputs.restore()
