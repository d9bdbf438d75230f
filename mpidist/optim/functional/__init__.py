"""Functional optimizers: ``optimizers`` (eight classes) over ``optimizer`` (torch's on aliases)."""

from mpidist.optim.functional.optimizer import FunctionalOptimizer
from mpidist.optim.functional.optimizers import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    RMSprop,
    Rprop,
)

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "FunctionalOptimizer",
    "RMSprop",
    "Rprop",
]
