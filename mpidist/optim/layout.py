"""Numbering of a distributed optimizer's parameters over all workers, for its state; pure.

Parameters are numbered group by group, reference by reference, and within a module in the order of
``parameters()``, as torch's optimizer would number them in one process. Each worker's optimizer
numbers the parameters that it owns in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, TypeVar

State = TypeVar("State")
Worker = TypeVar("Worker")
# Parameters of a reference: a list is made of as many numbers.
_MOST = 1 << 24


class Layout(Generic[Worker]):
    """Owners of the parameters of each group.

    Attributes:
        groups: For each group, the owner of each reference and its number of parameters.
    """

    def __init__(self) -> None:
        self.groups: list[list[tuple[Worker, int]]] = []

    def add(self, owners: Sequence[Worker], counts: Mapping[Worker, Sequence[int]]) -> None:
        """Add a group.

        Args:
            owners: The owner of each reference.
            counts: For each owner, the number of parameters of each of its references.

        Raises:
            ValueError: An owner's counts are not those of its references; no group is added.
        """
        for owner, found in counts.items():
            if len(found) != owners.count(owner) or not all(
                type(count) is int and 0 <= count <= _MOST for count in found
            ):
                raise ValueError(
                    f"{owner} tells {list(found)!r} as the numbers of parameters of "
                    f"{owners.count(owner)} references"
                )
        following = {owner: iter(found) for owner, found in counts.items()}
        self.groups.append([(owner, next(following[owner])) for owner in owners])

    def size(self, group: int) -> int:
        """Return the number of parameters in a group."""
        return sum(count for _, count in self.groups[group])

    def groups_of(self, worker: Worker) -> list[int]:
        """Return the groups in which a worker owns parameters: those of its own optimizer."""
        return [
            number
            for number, group in enumerate(self.groups)
            if any(owner == worker for owner, _ in group)
        ]

    def numbers(self) -> list[list[int]]:
        """Return the numbers of each group's parameters."""
        found, first = [], 0
        for group in range(len(self.groups)):
            found.append(list(range(first, first + self.size(group))))
            first += self.size(group)
        return found

    def numbers_of(self, worker: Worker) -> list[list[int]]:
        """Return the numbers of a worker's parameters, for each group of its own optimizer."""
        found = []
        for group in self.groups_of(worker):
            numbers = iter(self.numbers()[group])
            own: list[int] = []
            for owner, count in self.groups[group]:
                taken = [next(numbers) for _ in range(count)]
                own += taken if owner == worker else []
            found.append(own)
        return found

    def gather(self, states: Mapping[Worker, Mapping[int, State]]) -> dict[int, State]:
        """Return the state of all parameters by number, from each worker's by its own numbers."""
        state: dict[int, State] = {}
        for worker, own in states.items():
            numbers = [number for group in self.numbers_of(worker) for number in group]
            state.update((numbers[here], value) for here, value in own.items())
        return dict(sorted(state.items()))

    def scatter(
        self, state: Mapping[int, State], workers: Iterable[Worker]
    ) -> dict[Worker, dict[int, State]]:
        """Return each worker's part of the state; inverse of ``gather``."""
        found = {}
        for worker in workers:
            numbers = [number for group in self.numbers_of(worker) for number in group]
            found[worker] = {
                here: state[number] for here, number in enumerate(numbers) if number in state
            }
        return found
