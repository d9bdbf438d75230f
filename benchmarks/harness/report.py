"""Results of a run as tables, JSON and plots."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import environment, palette, pictures, tables
from harness.goals import format_bytes
from harness.palette import Theme
from harness.timing import Series, compare
from mpidist import whole_file

# Pairs shown for each operation in which both contenders take part.
_PAIRS = (
    ("gloo", "mpidist"),
    ("gloo", "native"),
    ("mpidist", "mpi4py"),
    ("native", "mpi4py"),
    ("mpidist", "mpidist fp32"),
    ("native", "native fp32"),
    ("staged", "library"),
    ("staged", "ring"),
    ("tensorpipe", "mpidist"),
    ("tensorpipe", "smart"),
    ("smart", "mpidist"),
    ("mpidist", "floor"),
    ("mpidist", "ping-pong"),
    ("mpidist", "mpidist no-op"),
    ("mpidist", "mpidist, fewer"),
    ("data only", "mpidist"),
    ("torch on mpidist", "torch on nccl"),
    ("torch on mpidist", "torch on gloo"),
    ("mpidist", "torch on nccl"),
    ("mpidist", "torch on gloo"),
    ("gloo", "node memory"),
    ("mpidist", "node memory"),
)


def result_of(
    operation: str, numel: int, size_bytes: int, series: Sequence[Series]
) -> dict[str, Any]:
    """Return one case's entry in the JSON."""
    by_name = {one.name: one for one in series}
    pairs = [
        (by_name[left], by_name[right])
        for left, right in _PAIRS
        if left in by_name and right in by_name
    ]
    return {
        "operation": operation,
        "numel": numel,
        "size_bytes": size_bytes,
        "contenders": {one.name: series_record(one) for one in series},
        "comparisons": [asdict(compare(left, right)) for left, right in pairs],
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the table of one operation's results."""
    # Some contenders lack some sizes.
    labels = list(dict.fromkeys(label for result in results for label in result["contenders"]))
    pairs = list(dict.fromkeys(_pair(pair) for result in results for pair in result["comparisons"]))
    rows = []
    for result in results:
        compared = {_pair(pair): _ratios(pair) for pair in result["comparisons"]}
        times = [
            _time(result["contenders"][label]) if label in result["contenders"] else ""
            for label in labels
        ]
        rows.append([_size(result), *times, *(compared.get(pair, "") for pair in pairs)])
    headers = [
        "size",
        *(f"{label}\nus (p10–p90)" for label in labels),
        *(pair.replace(" / ", " /\n") for pair in pairs),
    ]
    return tables.text(rows, headers)


def print_by_operation(results: Sequence[dict[str, Any]], unit: str = "") -> None:
    """Print a table for each operation among the results."""
    for operation in dict.fromkeys(result["operation"] for result in results):
        same = [result for result in results if result["operation"] == operation]
        print(f"\n{operation}{unit}\n{table(same)}", flush=True)


def _pair(comparison: dict[str, Any]) -> str:
    return f"{comparison['left']} / {comparison['right']}"


def _ratios(comparison: dict[str, Any]) -> str:
    return f"{comparison['ratio_of_rounds']:.2f} ({comparison['ratio_of_medians']:.2f})"


def goals_table(verdicts: Sequence[dict[str, Any]]) -> str:
    """Return the table of the goals."""
    rows = []
    for verdict in verdicts:
        place = (
            f" at {format_bytes(verdict['worst_size_bytes'])}"
            if verdict["worst_size_bytes"]
            else ""
        )
        worst = "" if verdict["worst"] is None else f"{verdict['worst']:.2f}{place}"
        missed = ", ".join(format_bytes(size) for size in verdict["missed_sizes_bytes"] if size)
        rows.append(
            (verdict["goal"], worst, verdict["verdict"] + (f" at {missed}" if missed else ""))
        )
    return tables.text(rows, ("to reach", "worst", "verdict"))


def write_json(record: dict[str, Any], path: Path) -> None:
    """Write a record, in the place of one of its name as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file.replacing(path) as file:
        file.write(f"{json.dumps(record, indent=1, ensure_ascii=False)}\n".encode())


def draw(record: Mapping[str, Any], theme: Theme) -> Any:
    """Draw one panel per operation: a line per contender, and a band from p10 to p90.

    Operations without a size are bars below, in a part of their own: their labels would take the
    width of the lines above.
    """
    results: dict[str, list[dict[str, Any]]] = {}
    for result in record["results"]:
        # Parts of a step are contained in its bar.
        if result["operation"].startswith("parts of "):
            continue
        results.setdefault(result["operation"], []).append(result)
    sized = {name: own for name, own in results.items() if any(one["size_bytes"] for one in own)}
    others = {name: own for name, own in results.items() if name not in sized}
    bars_of_panel = [len(own[0]["contenders"]) for own in others.values()]
    columns = 2 if len(sized) in (2, 4) else max(min(len(sized), 3), 1)
    heights = (
        (2.3 if columns > 2 else 3.2) * -(-len(sized) // columns) + 1.1,
        sum(0.26 * bars + 1.0 for bars in bars_of_panel) + 0.4,
    )
    about = record["environment"]
    made = pictures.sheet(
        sum(heights),
        environment.title(record, f"One call on {about['ranks']} ranks"),
        f"slowest rank, median of {record['rounds']} rounds, p10 to p90; "
        f"{environment.binding(about).split(':')[0]}",
    )
    above, below = made, made
    if sized and others:
        above, below = made.subfigures(2, 1, height_ratios=heights)
    for axes, (operation, own) in zip(
        pictures.panels(above, len(sized), columns) if sized else (), sized.items(), strict=True
    ):
        axes.set_title(operation)
        draw_lines(axes, theme, record["benchmark"], own)
    for axes, (operation, own) in zip(
        pictures.panels(below, len(others), 1, bars_of_panel) if others else (),
        others.items(),
        strict=True,
    ):
        axes.set_title(operation)
        _draw_bars(axes, theme, record["benchmark"], own)
    if sized:
        pictures.legend(above, 3)
    return made


def draw_lines(axes: Any, theme: Theme, benchmark: str, results: Sequence[dict[str, Any]]) -> None:
    """Draw a line for each contender over the size, and a band from p10 to p90."""
    sizes = [result["size_bytes"] for result in results]
    in_elements = any("fp32" in name for result in results for name in result["contenders"])
    places = [result["numel"] for result in results] if in_elements else sizes
    draw_series(axes, theme, benchmark, results, places)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="elements" if in_elements else "bytes", ylabel="µs a call")
    ticks = _apart(places)
    axes.set_xticks(ticks, [_short(tick) for tick in ticks])
    axes.minorticks_off()


def draw_series(
    axes: Any,
    theme: Theme,
    benchmark: str,
    results: Sequence[dict[str, Any]],
    places: Sequence[int],
) -> None:
    """Draw each contender's medians at the results' places, and a band from p10 to p90."""
    for name in results[0]["contenders"]:
        values = [result["contenders"][name] for result in results]
        style = palette.contender(benchmark, name)
        pictures.line(axes, theme, style, places, [one["median_us"] for one in values])
        low, high = [one["p10_us"] for one in values], [one["p90_us"] for one in values]
        pictures.band(axes, theme, style, places, low, high)


def _apart(places: Sequence[int]) -> list[int]:
    """Return sizes that are a quarter of a logarithmic axis apart at least, with both ends."""
    octaves = [math.log2(place) for place in places]
    least = 0.25 * (octaves[-1] - octaves[0])
    kept = [0]
    for index, octave in enumerate(octaves):
        if octave - octaves[kept[-1]] >= least and octaves[-1] - octave >= least:
            kept.append(index)
    return [places[index] for index in dict.fromkeys([*kept, len(places) - 1])]


def _draw_bars(axes: Any, theme: Theme, benchmark: str, results: Sequence[dict[str, Any]]) -> None:
    found = results[0]["contenders"]
    medians = [one["median_us"] for one in found.values()]
    unit, in_unit = ("ms", 1e3) if max(medians) >= 1e4 else ("µs", 1)
    draw_bars(axes, theme, benchmark, found, in_unit)
    if max(medians) > 20 * min(medians):
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set(xlabel=f"{unit} a call")


def draw_bars(
    axes: Any, theme: Theme, benchmark: str, found: Mapping[str, dict[str, Any]], in_unit: float
) -> None:
    """Draw a bar for each contender, in a unit of so many microseconds."""
    pictures.bars(
        axes,
        theme,
        [palette.contender(benchmark, name) for name in found],
        [
            {
                "median": one["median_us"] / in_unit,
                "low": one["p10_us"] / in_unit,
                "high": one["p90_us"] / in_unit,
            }
            for one in found.values()
        ],
    )


def series_record(series: Series) -> dict[str, Any]:
    """Return a contender's times for the record."""
    return {
        "median_us": series.median_us,
        "p10_us": series.percentile_us(10),
        "p90_us": series.percentile_us(90),
        "passes_per_burst": series.passes_per_burst,
        "calls_per_pass": series.calls_per_pass,
        "rounds_us": [float(f"{value:.5g}") for value in series.rounds_us],
    }


def _size(result: dict[str, Any]) -> str:
    if "mpidist fp32" in result["contenders"]:
        return f"{_short(result['numel'])} el."
    return format_bytes(result["size_bytes"]) if result["size_bytes"] else "–"


def _time(values: dict[str, Any]) -> str:
    return " ".join(
        (_digits(values["median_us"]), f"({_digits(values['p10_us'])}–{_digits(values['p90_us'])})")
    )


def _digits(value_us: float) -> str:
    return (
        f"{value_us:.0f}"
        if value_us >= 100
        else f"{value_us:.1f}"
        if value_us >= 10
        else f"{value_us:.2f}"
    )


def _short(number: int) -> str:
    for unit, name in ((1 << 20, "Mi"), (1 << 10, "Ki")):
        if number >= unit and number % unit == 0:
            return f"{number // unit}{name}"
    return str(number)
