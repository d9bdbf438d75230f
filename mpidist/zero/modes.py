"""Step modes of the sharded optimizer: in ``step``, in the backward pass, or in a join.

``Modes`` decides whether a call of ``step`` takes a step; its subclass ``OSS`` has the step itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable

from mpidist.comm.group_types import AnyGroup
from mpidist.comm.resolve_group import default_group
from mpidist.dynamo import untraced
from mpidist.zero import groups
from mpidist.zero.in_backward import BackwardEndHook, BackwardSteps, Hook, SteppingHook
from mpidist.zero.join import BorrowedGradients, StepHook, require_named
from mpidist.zero.parameter_changes import ParameterChanges


@untraced
class Modes(ParameterChanges, Joinable):
    """Step modes of the sharded optimizer.

    Attributes:
        before_step: Called before each step on a rank with inputs; set by
            ``DistributedDataParallel.join``.
    """

    before_step: Callable[[], object] | None = None

    def _init_modes(self, process_group: AnyGroup) -> None:
        Joinable.__init__(self)
        self._process_group = process_group
        self._backward_steps: BackwardSteps | None = None
        self._completes = False  # the end of a backward pass takes the rest of the step
        self._is_completing = self._is_joined = False
        self._borrowed = BorrowedGradients()

    # --- steps within the backward pass ---

    def stepping_hook(self, hook: Hook) -> SteppingHook:
        """Return a communication hook that runs ``hook``, then steps its bucket on this rank.

        Register it with ``register_comm_hook(state, optimizer.stepping_hook(hook))``, which passes
        ``state`` to ``hook``. Each bucket is one call of the base optimizer's ``step`` with the
        settings of that moment. ``step()`` then steps what was in no bucket (sparse gradients,
        parameters that only other ranks used) and gathers the shards; it must follow each backward
        pass that averages. Passes under ``no_sync`` only accumulate. Parameters must not be written
        between the backward pass and ``step()``. Called by all ranks.

        Args:
            hook: mpidist's or torch's; torch's DistributedDataParallel is on the backend
                ``mpidist``.

        Raises:
            ValueError: ``one_copy``: other ranks may still read what this rank would write.
            TypeError: ``hook`` cannot be called.
        """
        if not callable(hook):
            raise TypeError(f"stepping_hook needs a communication hook; got {type(hook).__name__}")
        if self._one_copy:
            raise ValueError(
                "one_copy=True and steps within the backward pass exclude each other: other ranks "
                "still read the copy"
            )
        if self._backward_steps is None:
            self._backward_steps = BackwardSteps(self)
        return SteppingHook(hook, self._backward_steps)

    def complete_after(self, module: torch.nn.Module) -> None:
        """Take the rest of the step at the end of each averaged backward pass of ``module``.

        ``step()`` then does nothing. The shards have arrived when the backward pass returns.

        Args:
            module: DistributedDataParallel, torch's or mpidist's, with a stepping hook. Its outputs
                are tensors, or lists, tuples and dicts of tensors.
        """
        self._completes = True
        module.register_forward_hook(BackwardEndHook(self._complete))

    def _complete(self) -> None:
        if self._backward_steps is not None and self._backward_steps.has_begun:
            self._opt_called = True  # for the check in torch's schedulers
            self._is_completing = True
            try:
                self.step()
            finally:
                self._is_completing = False

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler.step() reads this attribute on all ranks.
        self._require_unstepped("GradScaler", "they have used scaled gradients")
        return False

    def _closure_error(self, closure: object) -> Exception | None:
        if closure is not None and self._backward_steps is not None:
            return RuntimeError(
                "a closure cannot be used with steps within the backward pass: it would run after "
                "the step"
            )
        return None

    def _require_unstepped(self, operation: str, reason: str) -> None:
        if self._backward_steps is not None:
            raise RuntimeError(
                f"{operation} cannot be used with steps within the backward pass: {reason}"
            )

    def _step_base(self, **kwargs: Any) -> Any:
        return (
            self.optim.step(**kwargs)
            if self._backward_steps is None
            else self._backward_steps.step_rest(**kwargs)
        )

    # --- uneven inputs ---

    def join_hook(self, **kwargs: object) -> StepHook:
        """Return the hook of torch's ``Join([ddp, optimizer])`` for a rank without inputs."""
        return StepHook(self.step_joined, self.end_joined)

    @property
    def join_device(self) -> torch.device:
        """Return the device for the collectives of torch's ``Join``."""
        return self.param_groups[0]["params"][0].device

    @property
    def join_process_group(self) -> AnyGroup:
        """Return the group for the collectives of torch's ``Join``."""
        return default_group() if self._process_group is None else self._process_group

    def step_joined(self) -> None:
        """Take the step of the other ranks on a rank without inputs.

        Collective: over the group, whose other ranks call ``step``.
        """
        self._is_joined = True
        try:
            self.step()
        finally:
            self._is_joined = False

    def end_joined(self) -> None:
        """Restore this rank's own gradients."""
        self._borrowed.restore()

    def _enters_step(self) -> bool:
        """Prepare this rank for a step; return False if the backward pass has taken the step."""
        steps = self._backward_steps
        if (
            self._completes
            and not (self._is_completing or self._is_joined)
            and steps is not None
            and not steps.has_begun
        ):
            warnings.warn(
                "step() does nothing: the backward pass takes the step (hook_with_zero_step)",
                stacklevel=4,
            )
            return False
        is_native = self.before_step is not None
        if not self._is_joined:
            if self.before_step is not None:
                self.before_step()
            else:
                require_named(
                    [group["params"][0] for group in self.param_groups if group["params"]]
                )
                Join.notify_join_context(self)
        if self._is_joined or is_native or self._join_config.enable:
            settings = self._borrowed.exchange(
                self.group,
                self._shards.parameters,
                self._shards.owned(),
                [groups.settings(group) for group in self.param_groups],
                not self._is_joined,
            )
            groups.sync(settings, self.param_groups)
        return True
