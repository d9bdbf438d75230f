"""Simulated nodes: ranks of one machine that count as being on several nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mpidist.comm.mpi import runtime
from mpidist.comm.mpi.world import number_alike

# By name: the node of a world rank, given the number of ranks.
LAYOUTS: dict[str, Callable[[int, int], int]] = {
    "one node": lambda rank, size: 0,
    "blocks": lambda rank, size: rank * 2 // size,
    "cyclic": lambda rank, size: rank % 2,
    "uneven": lambda rank, size: int(rank > 0),
    "alone": lambda rank, size: rank,
}
SEVERAL = ("blocks", "cyclic", "uneven")


def lay_out(world: Any, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Have the groups that are made from now on find their ranks on the nodes of a layout."""
    nodes = [LAYOUTS[layout](rank, world.size) for rank in range(world.size)]
    monkeypatch.setattr(
        runtime.World, "nodes_of", lambda self, ranks: number_alike(nodes[rank] for rank in ranks)
    )


@contextlib.contextmanager
def groups(world: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Yield a function that makes a group of all ranks on a layout's nodes; close them at the end.

    Collective: calls of the function, and the end.
    """
    made = []

    def clone(layout: str, **options: Any) -> Any:
        lay_out(world, monkeypatch, layout)
        made.append(world.clone(layout, **options))
        return made[-1]

    yield clone
    for group in made:
        group.close()
