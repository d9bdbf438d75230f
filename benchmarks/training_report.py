"""Training steps as tables, JSON and bar plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import environment
import numpy as np
import plots
import tables
from timing import Series


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
                "median_us": one.median_us,
                "p10_us": one.percentile_us(10),
                "p90_us": one.percentile_us(90),
                "exposed_us": one.median_us - bare_us,
                "over_bare": one.median_us / bare_us,
                "rounds_us": [float(f"{value:.5g}") for value in one.rounds_us],
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


def write(record: dict[str, Any], path: Path) -> None:
    """Write the JSON, and the plot next to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(plots.beside(record, path, draw), flush=True)


def draw(record: dict[str, Any], path: Path) -> None:
    """Plot one panel per model: bars of the steps, and a line at the bare step."""
    from matplotlib.figure import Figure

    results = record["results"]
    figure = Figure(figsize=(4.6 * len(results), 4.2), layout="constrained")
    about = record["environment"]
    link = f", {record['link']}" if record["link"] else ""
    figure.suptitle(
        f"Steps on {about['ranks']} ranks, {about['mpi_library']}{link}, torch {about['torch']}, "
        f"{environment.processor(about)}\n"
        f"slowest rank, median of {record['rounds']} rounds and p10–p90; "
        f"{environment.binding(about).split(':')[0]}",
        fontsize="medium",
    )
    for axes, result in zip(
        np.atleast_1d(figure.subplots(1, len(results))).tolist(), results, strict=True
    ):
        names = list(result["contenders"])
        values = list(result["contenders"].values())
        median = np.array([v["median_us"] for v in values]) / 1e3
        low = median - np.array([v["p10_us"] for v in values]) / 1e3
        high = np.array([v["p90_us"] for v in values]) / 1e3 - median
        colors = [
            "tab:blue"
            if "mpidist" in n and "torch" not in n
            else "tab:red"
            if "torch" in n
            else "tab:grey"
            for n in names
        ]
        axes.barh(
            names[::-1],
            median[::-1],
            xerr=(low[::-1].clip(0), high[::-1].clip(0)),
            color=colors[::-1],
            capsize=2,
        )
        axes.axvline(result["bare_us"] / 1e3, color="black", linewidth=0.8, linestyle="--")
        axes.set(title=result["model"], xlabel="ms a step")
        axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)
