"""Post-local SGD: an optimizer that runs a model averager after each of its steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch


class ModelAverager(Protocol):
    """Model averager, of ``mpidist.ddp.model_averaging`` or torch's.

    Attributes:
        step: The number of calls of ``average_parameters``.
    """

    step: int

    def average_parameters(self, params: Iterable[dict[str, Any]], /) -> None:
        """Average the parameters of groups, in the steps in which an average is due."""


class PostLocalSGDOptimizer(torch.optim.Optimizer):
    """Local optimizer whose parameters a model averager averages after its steps, periodically.

    The averager's count of steps is part of ``state_dict``, as ``"step"``, so that a resumed run
    does not warm up again.

    Args:
        optim: The local optimizer.
        averager: Called with the parameter groups after each step.

    Raises:
        TypeError: ``optim`` is no optimizer, or ``averager`` has no ``average_parameters``.

    Source:
        ``torch.distributed.optim.PostLocalSGDOptimizer``, with the same names and meanings.
        Addition: ``step`` takes a closure.
    """

    def __init__(self, optim: torch.optim.Optimizer, averager: ModelAverager) -> None:
        if not isinstance(optim, torch.optim.Optimizer):
            raise TypeError(f"optim must be a torch.optim.Optimizer; got {type(optim).__name__}")
        if not callable(getattr(averager, "average_parameters", None)):
            raise TypeError(f"averager must be a model averager; got {type(averager).__name__}")
        self.optim = optim
        self.param_groups = optim.param_groups
        self.averager = averager

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Return the local optimizer's state."""
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the local optimizer's defaults."""
        return self.optim.defaults

    def __repr__(self) -> str:
        return repr(self.optim)

    def state_dict(self) -> dict[str, Any]:
        """Return the local optimizer's state, with the averager's step."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state; without a ``"step"`` the averager starts at 0, with a warning."""
        self.optim.load_state_dict(
            {name: value for name, value in state_dict.items() if name != "step"}
        )
        self.param_groups = self.optim.param_groups
        if "step" not in state_dict:
            warnings.warn(
                "the loaded state has no step of a model averager: it starts at 0", stacklevel=2
            )
        self.averager.step = state_dict.get("step", 0)

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Step the local optimizer, then call the averager.

        Collective: over the averager's group, in the steps in which the averager averages.
        """
        loss = self.optim.step(closure)
        self.averager.average_parameters(self.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optim.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the local optimizer."""
        self.optim.add_param_group(param_group)
