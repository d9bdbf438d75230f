"""Tables and goals of the benchmark of optimizer state."""

from __future__ import annotations

import statistics
from typing import Any

from harness import tables

# Ratios to FairScale's speed.
_GOALS = {"used again": 8.0, "fresh": 6.0}


def goals(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the verdict of each goal."""
    times = {name: statistics.median(values) for name, values in record["consolidation_ms"].items()}
    theirs = times.get("FairScale on Gloo")
    found = []
    for name, least in _GOALS.items():
        ratio = None if theirs is None else theirs / times[name]
        goal = f"consolidation into memory {name}: {least:g} x FairScale's"
        found.append({"goal": goal, "value": ratio, "reached": _at_least(ratio, least)})
    return found


def show(record: dict[str, Any], ranks: int) -> None:
    """Print the tables."""
    rows = [
        (name, statistics.median(values), min(values), max(values))
        for name, values in record["consolidation_ms"].items()
    ]
    print(f"{record['parameters']} parameters, {ranks} ranks")
    print(tables.text(rows, ("consolidation", "ms, median", "least", "most"), floats=".1f"))
    print(tables.text(record["memory_mib"].items(), ("MiB of each rank", "")))
    print(
        tables.text(
            [list(one.values()) for one in record["goals"]],
            ("goal", "value", "reached"),
            floats=".2f",
        )
    )


def _at_least(value: float | None, least: float) -> bool | None:
    return None if value is None else value >= least
