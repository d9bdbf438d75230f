"""Partition of parameters among ranks (pure): the owner of each parameter, or of each part.

Letters: W ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import torch

from mpidist import state_names

GREEDY, BALANCED, FLAT = "greedy", "balanced", "flat"
PARTITIONS = (GREEDY, BALANCED, FLAT)

_OF_MATRICES = ("Muon", "Shampoo", "SOAP")

Cost = Callable[[torch.Tensor], float]


def greedy(sizes: Sequence[int], loads: Sequence[float]) -> tuple[list[int], list[float]]:
    """Assign each parameter, in their order, to the rank with the smallest load.

    Arguments and result as of ``balanced``.

    Source: the rule of FairScale's ``OSS.partition_parameters``.
    """
    return _assigned(range(len(sizes)), sizes, loads)


def balanced(costs: Sequence[float], loads: Sequence[float]) -> tuple[list[int], list[float]]:
    """Assign the parameters, the most expensive first, to the rank with the smallest load.

    The largest load is at most 4/3 - 1/(3W) of the optimum.

    Args:
        costs: Of each parameter.
        loads: Cost that each rank has already.

    Returns:
        The owner of each parameter, and the ranks' loads afterwards.

    Source: R. L. Graham, Bounds on Multiprocessing Timing Anomalies, SIAM J. Appl. Math. 17 (1969):
    the rule LPT.
    """
    return _assigned(sorted(range(len(costs)), key=lambda index: -costs[index]), costs, loads)


def _assigned(
    order: Iterable[int], costs: Sequence[float], loads: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Assign parameters in an order, each to the first rank with the smallest load."""
    owners, heap = [0] * len(costs), [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for index in order:
        load, rank = heap[0]
        owners[index] = rank
        heapq.heapreplace(heap, (load + costs[index], rank))
    return owners, [load for load, _ in sorted(heap, key=lambda entry: entry[1])]


class Owners(list[int]):
    """The rank that owns each parameter, by the parameter's number.

    Args:
        partition: ``"balanced"``, else the greedy rule.
        cost: Of a parameter, for ``"balanced"``.
        ranks: W.
    """

    def __init__(self, partition: str, cost: Cost, ranks: int) -> None:
        super().__init__()
        self._is_balanced = partition == BALANCED
        self._cost = cost
        self._loads: list[float] = [0] * ranks

    def choose(self, parameters: Sequence[torch.Tensor]) -> tuple[list[int], list[float]]:
        """Return the owners of more parameters, and the ranks' loads with them; changes nothing."""
        if self._is_balanced:
            return balanced(
                [self._cost(p) if p.requires_grad else 1 for p in parameters], self._loads
            )
        return greedy([p.numel() if p.requires_grad else 1 for p in parameters], self._loads)

    def add(self, parameters: Sequence[torch.Tensor]) -> None:
        """Choose and keep the owners of more parameters."""
        owners, self._loads = self.choose(parameters)
        self += owners


def cuts(numel: int, ranks: int, unit: int) -> list[int]:
    """Divide ``numel`` elements into parts of equal size up to ``unit``, which divides ``numel``.

    Returns:
        W + 1 bounds, multiples of ``unit``.
    """
    return [numel * rank // ranks // unit * unit for rank in range(ranks)] + [numel]


def is_element_wise(optim: type) -> bool:
    """Return whether a class of optimizers may step parts of a parameter.

    True for torch's element-wise classes and for classes with ``is_element_wise = True``. A
    subclass needs the attribute itself: it may compute norms.
    """
    return optim in state_names.NAMES or bool(vars(optim).get("is_element_wise", False))


def cost_of(cost: str | Cost | None, optim: type) -> Cost:
    """Return the function that computes a parameter's cost.

    Args:
        cost: ``"bytes"``, ``"matrix"`` (max(m, n)·min(m, n)², the products of an m × n matrix with
            itself), a function of the parameter, or None: ``"matrix"`` for Muon, Shampoo and SOAP,
            else ``"bytes"``.

    Raises:
        ValueError: Another word.
    """
    if callable(cost):
        return cost
    if cost is None:
        cost = "matrix" if any(base.__name__ in _OF_MATRICES for base in optim.__mro__) else "bytes"
    if cost not in ("bytes", "matrix"):
        raise ValueError(f'cost is "bytes", "matrix" or a function of a parameter; got {cost!r}')
    return attrgetter("nbytes") if cost == "bytes" else _products


def _products(parameter: torch.Tensor) -> float:
    if parameter.dim() < 2:
        return parameter.numel()
    rows = parameter.shape[0]
    columns = parameter.numel() // max(rows, 1)
    return max(rows, columns) * min(rows, columns) ** 2


def require(partition: str, optim: object) -> None:
    """Refuse a partition or a class of optimizers that cannot be sharded.

    Raises:
        ValueError: An unknown partition, a flat one of an optimizer that is not known to be
            element-wise, or LBFGS.
        TypeError: ``optim`` is no class of optimizers.
    """
    if not (isinstance(optim, type) and issubclass(optim, torch.optim.Optimizer)):
        raise TypeError(f"optim is a class of torch.optim.Optimizer; got {optim!r}")
    if issubclass(optim, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS computes its step from inner products over all parameters, which no rank has"
        )
    if partition not in PARTITIONS:
        raise ValueError(
            f"partition is one of {', '.join(map(repr, PARTITIONS))}; got {partition!r}"
        )
    if partition == FLAT and not is_element_wise(optim):
        raise ValueError(
            f"partition='flat' cuts through parameters, and {optim.__name__} is not known to treat "
            "each element by itself: on parts of a matrix it would train wrongly without an error. "
            "Take 'balanced' (or 'greedy'), which keep parameters whole; if "
            f"{optim.__name__} is element-wise, set is_element_wise = True in its class"
        )
