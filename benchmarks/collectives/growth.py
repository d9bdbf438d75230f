"""Cost of one item at different numbers of items: numbers in turns, medians, and their ratio.

Python's garbage collector works as in a user's program: it is part of the cost, and grows with the
containers that are alive.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from collectives.growth_cases import Work
from harness import pictures, tables
from harness.palette import SERIES, Theme, named

# By number of items: ``wall_us`` of the slowest rank and ``cpu_us`` of this thread, for each item.
Found: TypeAlias = dict[int, dict[str, list[float]]]

# A case is linear if an item costs at most so many times what it does among a tenth as many.
LINEAR = 1.5


def measure(group: Any, works: Mapping[int, Work], rounds: int) -> Found:
    """Time work on each number of items in turns, after one round that is not counted.

    Collective: over the group.
    """
    found: Found = {items: {"wall_us": [], "cpu_us": []} for items in works}
    for number in range(rounds + 1):
        for items, work in works.items() if number % 2 else reversed(works.items()):
            group.barrier()
            start, cpu = time.perf_counter(), time.thread_time()
            held = work.run()
            passed = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            cpu = time.thread_time() - cpu
            work.check(held)
            group.all_reduce(passed, "max")
            del held
            if number:
                found[items]["wall_us"].append(1e6 * float(passed) / items)
                found[items]["cpu_us"].append(1e6 * cpu / items)
    return found


def medians(found: Found, key: str) -> dict[int, float]:
    """Return the median of a time by number of items, in rising order."""
    return {items: statistics.median(found[items][key]) for items in sorted(found)}


def verdict(found: Found) -> str:
    """Return "linear", or the steps from one number of items to the next that are not."""
    wall = list(medians(found, "wall_us").items())
    steps = [
        f"{last[0]} to {here[0]}: {here[1] / last[1]:.2f}"
        for last, here in itertools.pairwise(wall)
        if here[1] > LINEAR * last[1]
    ]
    return ", ".join(steps) or "linear"


def table(results: Mapping[str, Found]) -> str:
    """Return the table of the medians of all cases."""
    sizes = sorted({items for found in results.values() for items in found})
    rows = []
    for name, found in results.items():
        wall, cpu = medians(found, "wall_us"), medians(found, "cpu_us")
        times = [wall.get(items) for items in sizes]
        rows.append((name, *times, cpu[max(cpu)], verdict(found)))
    headers = ("us an item", *map(str, sizes), "CPU of its thread", "growth")
    return tables.text(rows, headers, floats=".2f")


def draw(record: Mapping[str, Any], theme: Theme) -> Any:
    """Draw the cost of an item over the number of items, a line for each case."""
    about = record["environment"]
    made = pictures.sheet(
        5.2,
        f"Cost of one item among many: {about['ranks']} ranks, {about['mpi_library']}, "
        f"torch {about['torch'].partition('+')[0]}, {about['cpu']}",
        f"slowest rank, median of {record['rounds']} rounds; level: many cost no more each",
    )
    (axes,) = pictures.panels(made, 1, 1)
    for (name, found), style in zip(record["results"].items(), SERIES, strict=False):
        wall = medians({int(items): times for items, times in found.items()}, "wall_us")
        pictures.line(axes, theme, named(style, name), list(wall), list(wall.values()))
    axes.set(xscale="log", yscale="log", xlabel="number of items", ylabel="µs an item")
    pictures.legend(made, 3)
    return made


def numbers(least: int, most: int) -> Sequence[int]:
    """Return the powers of ten from ``least`` to ``most``."""
    found = [least]
    while found[-1] * 10 <= most:
        found.append(found[-1] * 10)
    return found
