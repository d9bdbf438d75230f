"""Cost of one item at different numbers of items: sizes in turns, medians, and their ratio.

Python's garbage collector works as in a user's program: it is part of the cost, and grows with the
containers that are alive.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from tabulate import tabulate

T = TypeVar("T")


def measure(
    group: Any,
    sizes: Sequence[int],
    rounds: int,
    run: Callable[[int], T],
    check: Callable[[T], object] | None = None,
) -> dict[int, dict[str, list[float]]]:
    """Time ``run(size)`` for each size in turns, after one round that is not counted.

    Collective: over the group.

    Args:
        check: Called with what ``run`` has returned, outside the time.

    Returns:
        By size, ``wall_us`` of the slowest rank and ``cpu_us`` of this thread, for each item.
    """
    found: dict[int, dict[str, list[float]]] = {
        size: {"wall_us": [], "cpu_us": []} for size in sizes
    }
    for number in range(rounds + 1):
        for size in sizes if number % 2 else reversed(sizes):
            group.barrier()
            start, cpu = time.perf_counter(), time.thread_time()
            held = run(size)
            passed = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            cpu = time.thread_time() - cpu
            if check is not None:
                check(held)
            group.all_reduce(passed, "max")
            del held
            if number:
                found[size]["wall_us"].append(1e6 * float(passed) / size)
                found[size]["cpu_us"].append(1e6 * cpu / size)
    return found


def table(name: str, found: dict[int, dict[str, list[float]]]) -> str:
    """Return the table of the medians, and of each size's ratio to the smallest."""
    medians = {
        size: {key: statistics.median(values) for key, values in times.items()}
        for size, times in found.items()
    }
    smallest = medians[min(medians)]
    rows = [
        (size, *(value for key in smallest for value in (here[key], here[key] / smallest[key])))
        for size, here in sorted(medians.items())
    ]
    headers = (name, "wall, us an item", "ratio", "CPU of its thread, us", "ratio")
    return tabulate(rows, headers, floatfmt=".2f")
