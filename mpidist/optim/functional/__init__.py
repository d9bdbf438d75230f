"""Functional optimizers: ``optimizers`` (one class a name) over ``optimizer`` (torch's own, on aliases of the parameters)."""

from mpidist.optim.functional.optimizer import FunctionalOptimizer
from mpidist.optim.functional.optimizers import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, RMSprop, Rprop

__all__ = ["SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "FunctionalOptimizer", "RMSprop", "Rprop"]
