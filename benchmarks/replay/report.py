"""Report on a replay: tables of the model's errors, of choices and of crossings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness import tables
from harness.goals import format_bytes
from replay.judgement import median_error

GOAL = 0.15


def text_of(record: Mapping[str, Any]) -> str:
    """Return the tables with their titles."""
    parts = {
        "Steps, SIMULATED and PREDICTED, ms": _steps(record["steps"]),
        "Steps of an optimizer in shards, SIMULATED and PREDICTED, ms": _steps(
            record.get("shards", [])
        ),
        f"Median error of the model (goal {GOAL:.0%})": _errors(record),
        "Bytes from which the second algorithm is the faster, SIMULATED and PREDICTED": (
            _crossings(record["crossings"])
        ),
        "Fastest hook, SIMULATED and PREDICTED": _choices(record["choices"]),
    }
    return "\n\n".join(f"{title}\n{text}" for title, text in parts.items() if text)


def _steps(steps: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            one["job"],
            one["network"],
            f"{one['rate_gbit_s']:g}",
            one["library"],
            one["hook"],
            one["ranks"],
            f"{1e3 * one['simulated_seconds']:.1f}",
            f"{1e3 * one['predicted_seconds']:.1f}",
            f"{one['relative_error']:+.0%}",
        )
        for one in steps
    ]
    headers = (
        "job",
        "network",
        "Gbit/s",
        "MPI",
        "hook",
        "ranks",
        "simulated",
        "predicted",
        "error",
    )
    return tables.text(rows, headers, keys=6) if rows else ""


def _errors(record: Mapping[str, Any]) -> str:
    return tables.text(
        [(name, count, f"{error:.0%}") for name, count, error in medians(record)],
        ("", "cases", "error"),
    )


def medians(record: Mapping[str, Any]) -> list[tuple[str, int, float]]:
    """Return name, number of cases and median error of parts of the judged cases."""
    found = []
    steps, collectives = record["steps"], record["collectives"]
    shards = record.get("shards", [])
    for name, entries, key, by in (
        ("all-reduces", collectives, "relative_error", ("library", "network")),
        ("all-reduces", collectives, "relative_error", ("library", "ranks")),
        ("steps", steps, "relative_error", ("library", "network")),
        ("steps", steps, "relative_error", ("library", "hook")),
        ("steps", steps, "relative_error", ("library", "ranks")),
        ("steps", steps, "relative_error", ("library", "job", "rate_gbit_s")),
        ("exposed", steps, "exposed_error", ("library", "network")),
        ("steps in shards", shards, "relative_error", ("library", "network")),
        ("exposed in shards", shards, "exposed_error", ("library", "network")),
    ):
        if not entries:
            continue
        if by == ("library", "network"):
            found.append((name, len(entries), median_error(entries, key)))
        for values, own in _grouped(entries, lambda one, by=by: tuple(one[part] for part in by)):
            found.append(
                (f"… {name}, {', '.join(map(str, values))}", len(own), median_error(own, key))
            )
    return found


def _grouped(
    entries: Sequence[Mapping[str, Any]], key: Callable[[Mapping[str, Any]], tuple[Any, ...]]
) -> list[tuple[tuple[Any, ...], list[Mapping[str, Any]]]]:
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for one in entries:
        groups.setdefault(key(one), []).append(one)
    return list(groups.items())


def _crossings(crossings: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            one["network"],
            f"{one['rate_gbit_s']:g}",
            one["ranks"],
            f"{one['first']}, {one['second']}",
            _bytes(one["simulated_bytes"]),
            _bytes(one["predicted_bytes"]),
        )
        for one in crossings
    ]
    headers = ("network", "Gbit/s", "ranks", "algorithms", "simulated", "predicted")
    return tables.text(rows, headers, keys=4) if rows else ""


def _bytes(nbytes: float | None) -> str:
    return "never" if nbytes is None else format_bytes(int(nbytes))


def _choices(choices: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            one["job"],
            one["network"],
            one["library"],
            f"{one['rate_gbit_s']:g}",
            one["ranks"],
            one["fastest"],
            one["chosen"],
            f"{one['lost']:.0%}",
        )
        for one in choices
    ]
    headers = ("job", "network", "MPI", "Gbit/s", "ranks", "simulated", "chosen", "lost")
    return tables.text(rows, headers, keys=5) if rows else ""
