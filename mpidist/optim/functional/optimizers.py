"""The functional optimizers: each is torch's of the same name, with its arguments."""

from __future__ import annotations

from typing import Any

import torch

from mpidist.optim.functional.optimizer import FunctionalOptimizer


class SGD(FunctionalOptimizer, torch.optim.SGD):  # type: ignore[misc]
    """Stochastic gradient descent; fused on the CPU. Takes sparse gradients, by torch's loop."""


class Adam(FunctionalOptimizer, torch.optim.Adam):  # type: ignore[misc]
    """Adam, with ``amsgrad``; fused on the CPU."""


class AdamW(FunctionalOptimizer, torch.optim.AdamW):  # type: ignore[misc]
    """Adam with decoupled weight decay; fused on the CPU."""


class Adagrad(FunctionalOptimizer, torch.optim.Adagrad):  # type: ignore[misc]
    """Adagrad; fused on the CPU. Takes sparse gradients, by torch's loop."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own settings; as torch's."""
        super().add_param_group(param_group)
        # torch 2.11 makes the state in the constructor alone, where this makes it first.
        added = self.param_groups[-1]
        start = added["initial_accumulator_value"]
        for alias in added["params"]:
            if not self.state[alias]:
                value = complex(start, start) if alias.is_complex() else start
                total = torch.full_like(alias, value, memory_format=torch.preserve_format)
                self.state[alias].update(step=torch.tensor(0.0), sum=total)


class Adadelta(FunctionalOptimizer, torch.optim.Adadelta):  # type: ignore[misc]
    """Adadelta."""


class Adamax(FunctionalOptimizer, torch.optim.Adamax):  # type: ignore[misc]
    """Adamax, Adam with the infinity norm."""


class RMSprop(FunctionalOptimizer, torch.optim.RMSprop):  # type: ignore[misc]
    """RMSprop, centered or not."""


class Rprop(FunctionalOptimizer, torch.optim.Rprop):  # type: ignore[misc]
    """Resilient backpropagation."""
