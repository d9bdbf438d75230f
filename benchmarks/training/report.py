"""Training steps as tables, JSON and bar plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness import environment, pictures, tables
from harness.palette import Theme
from harness.report import draw_bars, series_record
from harness.timing import Series


def result_of(model: Any, series: Sequence[Series], base: str) -> dict[str, Any]:
    """Return one model's entry in the JSON.

    Args:
        base: Prefix of the contenders without communication; the fastest of these counts. Exposed
            time is the difference to that step.
    """
    bare_us = min(one.median_us for one in series if one.name.startswith(base))
    return {
        "model": model.name,
        "parameters": model.numel(),
        "bare_us": bare_us,
        "contenders": {
            one.name: {
                **series_record(one),
                "exposed_us": one.median_us - bare_us,
                "over_bare": one.median_us / bare_us,
            }
            for one in series
        },
    }


def table(result: dict[str, Any]) -> str:
    """Return the table of one model."""
    rows = [
        (
            name,
            f"{values['median_us'] / 1e3:.1f}",
            f"{values['p10_us'] / 1e3:.1f}–{values['p90_us'] / 1e3:.1f}",
            f"{values['exposed_us'] / 1e3:.1f}",
            f"{values['over_bare']:.3f}",
        )
        for name, values in result["contenders"].items()
    ]
    headers = (f"{result['model']}", "step ms", "p10–p90", "more than bare, ms", "over bare")
    return tables.text(rows, headers) + "\n"


def draw(record: Mapping[str, Any], theme: Theme) -> Any:
    """Draw one panel per model: bars of the steps, and a line at the step without communication."""
    results = record["results"]
    columns = min(len(results), 2)
    rows = -(-len(results) // columns)
    most = max(len(result["contenders"]) for result in results)
    about = record["environment"]
    made = pictures.sheet(
        (0.26 * most + 0.95) * rows + 0.9,
        environment.title(
            record, f"A training step on {about['ranks']} rank{'s' * (about['ranks'] > 1)}"
        ),
        f"slowest rank, median of {record['rounds']} rounds, p10–p90; dashed: no communication; "
        f"{environment.binding(about).split(':')[0]}",
    )
    for place, (axes, result) in enumerate(
        zip(pictures.panels(made, len(results), columns), results, strict=True)
    ):
        draw_bars(axes, theme, record["benchmark"], result["contenders"], 1e3)
        if place % columns:
            # The panel at its left has the same bars.
            axes.tick_params(axis="y", labelleft=False)
        axes.axvline(result["bare_us"] / 1e3, color=theme.ink, linewidth=1, linestyle="--")
        axes.set(title=result["model"], xlabel="ms a step")
    return made
