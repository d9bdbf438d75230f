"""The functional optimizers: each is torch's of the same name, with its arguments."""

from __future__ import annotations

import torch.optim

from mpidist.optim.functional.optimizer import FunctionalOptimizer


class SGD(FunctionalOptimizer, torch.optim.SGD):  # type: ignore[misc]
    """Stochastic gradient descent; fused on the CPU. Takes sparse gradients, by torch's loop."""


class Adam(FunctionalOptimizer, torch.optim.Adam):  # type: ignore[misc]
    """Adam, with ``amsgrad``; fused on the CPU."""


class AdamW(FunctionalOptimizer, torch.optim.AdamW):  # type: ignore[misc]
    """Adam with decoupled weight decay; fused on the CPU."""


class Adagrad(FunctionalOptimizer, torch.optim.Adagrad):  # type: ignore[misc]
    """Adagrad; fused on the CPU. Takes sparse gradients, by torch's loop."""


class Adadelta(FunctionalOptimizer, torch.optim.Adadelta):  # type: ignore[misc]
    """Adadelta."""


class Adamax(FunctionalOptimizer, torch.optim.Adamax):  # type: ignore[misc]
    """Adamax, Adam with the infinity norm."""


class RMSprop(FunctionalOptimizer, torch.optim.RMSprop):  # type: ignore[misc]
    """RMSprop, centered or not."""


class Rprop(FunctionalOptimizer, torch.optim.Rprop):  # type: ignore[misc]
    """Resilient backpropagation."""
