"""Functional form of any optimizer: ``.grad`` holds the given gradients during a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from mpidist import state_scalars
from mpidist.optim import fused, precision
from mpidist.optim.parameter_locks import ParameterLocks

Tensor = torch.Tensor


class GradAttributeOptimizer:
    """Optimizer with gradients as arguments of ``step``, over one that reads ``.grad``.

    The wrapped optimizer gets the parameters themselves, because some optimizers use their identity
    or attributes. ``.grad`` is restored after each step. A backward pass outside distributed
    autograd may still write ``.grad`` during a step.

    Attributes:
        locks: Held during a step; shared with all optimizers of one of these parameters.

    Args:
        optimizer_class: A subclass of ``torch.optim.Optimizer``.
        params: Parameters or groups; passed to ``optimizer_class``, like the further arguments.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params: ParamsT,
        *args: object,
        **kwargs: object,
    ) -> None:
        self._optimizer = optimizer_class(params, *args, **kwargs)
        for group in self.param_groups:
            precision.warn_of_no_eps(group)
        self.locks = ParameterLocks()
        self.locks.add(self.parameters)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters, in the order in which ``step`` takes their gradients."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own."""
        return self._optimizer.param_groups

    @property
    def defaults(self) -> dict[str, object]:
        """The optimizer's own."""
        return self._optimizer.defaults

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Update the parameters.

        Blocks: while another optimizer updates one of them.

        Args:
            gradients: One for each parameter; for None its ``.grad`` is None during the step.

        Raises:
            ValueError: Another number of gradients, or a fused kernel and a parameter that is not
                non-overlapping and dense.
        """
        parameters = self.parameters
        with self.locks:
            kept = [parameter.grad for parameter in parameters]
            try:
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                self._lay_out()
                self._optimizer.step()
            finally:
                for parameter, gradient in zip(parameters, kept, strict=True):
                    parameter.grad = gradient

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Add parameters with their own settings."""
        self._optimizer.add_param_group(param_group)
        self.locks.add(self.parameters)

    def remove_last_group(self) -> None:
        """Remove the last added group and its state."""
        with self.locks:
            for parameter in self.param_groups.pop()["params"]:
                self._optimizer.state.pop(parameter, None)

    def state_dict(self) -> dict[str, object]:
        """Return the optimizer's state."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the same optimizer.

        Raises:
            ValueError: A state of a shape that the fused kernel of its group does not take.
        """
        with self.locks:
            self._require_shapes(state_dict)
            state_scalars.load(self._optimizer, state_dict)

    def _require_shapes(self, state_dict: dict[str, Any]) -> None:
        """Refuse tensors beyond whose memory a fused kernel would read and write."""
        for own, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, number in zip(own["params"], saved["params"], strict=True):
                present = self._optimizer.state.get(parameter, {})
                for name, value in (state_dict["state"].get(number) or {}).items():
                    if own.get("fused") and isinstance(value, Tensor):
                        fused.require_state(name, value, parameter, present=present.get(name))

    def _lay_out(self) -> None:
        """Copy gradients and state for fused kernels to their parameter's strides."""
        for group in self.param_groups:
            if not group.get("fused"):
                continue
            fused.require_dense(group["params"])
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                parameter.grad = fused.laid_out(parameter.grad, parameter)
                state = self._optimizer.state.get(parameter, {})
                for name, value in state.items():
                    if isinstance(value, Tensor):
                        state[name] = fused.laid_out(value, parameter)
