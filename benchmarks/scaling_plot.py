"""Plot of a scaling report: measured points as markers, predictions in shaded panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import environment
import scaling_model as models
from cost_model import Point
from matplotlib.figure import Figure

_COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")
_SHADE = "#f3f0e6"


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Write the PNG: measured steps and all-reduces, held-out points, and predictions."""
    figure = Figure(figsize=(15, 9), layout="constrained")
    about = record["jobs"][0]["environment"]
    figure.suptitle(
        f"Scaling of a data-parallel step: {environment.processor(about)}, torch {about['torch']}, "
        f"{', '.join(sorted({job['environment']['mpi_library'] for job in record['jobs']}))}\n"
        "filled: a core for each rank; hollow: more ranks than cores; shaded: PREDICTED by the "
        "model, not measured",
        fontsize="medium",
    )
    panels = figure.subplots(2, 3)
    _weak(panels[0][0], record)
    _all_reduce(panels[0][1], record)
    _held_out(panels[0][2], record)
    _predicted(panels[1][0], record, "predicted_seconds", "predicted step, s")
    _predicted(panels[1][1], record, "efficiency", "predicted efficiency")
    _strong(panels[1][2], record)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _weak(axes: Any, record: Mapping[str, Any]) -> None:
    axes.set(
        title="measured: weak scaling, uncompressed, largest network",
        xlabel="ranks",
        ylabel="step, s",
        yscale="log",
    )
    _markers(
        axes,
        _largest(
            [one for one in record["steps"] if one["scaling"] == "weak" and one["hook"] == "none"]
        ),
        "seconds",
    )


def _strong(axes: Any, record: Mapping[str, Any]) -> None:
    axes.set(
        title="measured: strong scaling, largest network",
        xlabel="ranks",
        ylabel="efficiency (of the cores)",
    )
    known = [
        one
        for one in record["steps"]
        if one["scaling"] == "strong" and one["efficiency"] is not None
    ]
    _markers(axes, _largest(known), "efficiency")


def _all_reduce(axes: Any, record: Mapping[str, Any]) -> None:
    axes.set(
        title="all-reduce: measured markers, model's dashed lines",
        xlabel="bytes",
        ylabel="s",
        xscale="log",
        yscale="log",
    )
    model = models.from_json(record["model"])
    wanted = [job for job in record["jobs"] if job["ranks"] > 1][: len(_COLORS)]
    for color, job in zip(_COLORS, wanted, strict=False):
        at = models.layout_of(job)
        found = [one for one in job["collectives"] if one["operation"] == "all_reduce"]
        label = f"{job['ranks']} ranks, {job['link'] or 'node'}"
        sizes = [one["nbytes"] for one in found]
        axes.plot(sizes, [one["us"] / 1e6 for one in found], **_marker(job, color), label=label)
        fit = model.fits.get(models.NODE if at.nodes == 1 else models.BETWEEN, {}).get("all_reduce")
        if fit is not None:
            points = [
                Point("all_reduce", at.nodes, at.ranks_per_node, size, at.rate_gbit_s, at.share)
                for size in sizes
            ]
            axes.plot(
                sizes, [fit.seconds(point) for point in points], "--", color=color, linewidth=1
            )
    _finish(axes)


def _held_out(axes: Any, record: Mapping[str, Any]) -> None:
    middle = record["validation"]["median_error"]
    error_text = "" if middle is None else f": median error {middle:.0%}"
    axes.set(
        title=f"held-out points{error_text}",
        xlabel="measured, s",
        ylabel="predicted, s",
        xscale="log",
        yscale="log",
    )
    for color, name in zip(_COLORS, (models.NODE, models.BETWEEN), strict=False):
        found = [one for one in record["held_out"] if one["class"] == name]
        axes.plot(
            [one["seconds"] for one in found],
            [one["predicted_seconds"] for one in found],
            "o",
            color=color,
            markersize=3,
            alpha=0.5,
            label=name,
        )
    ends = [min((one["seconds"] for one in record["held_out"]), default=1e-5)]
    ends.append(max((one["seconds"] for one in record["held_out"]), default=1.0))
    axes.plot(ends, ends, "-", color="black", linewidth=0.8)
    _finish(axes)


def _predicted(axes: Any, record: Mapping[str, Any], key: str, label: str) -> None:
    axes.set_facecolor(_SHADE)
    axes.set(
        title=f"PREDICTION: {label.removeprefix('predicted ')}, weak",
        xlabel="ranks, one a node",
        ylabel=label,
        xscale="log",
    )
    found = _largest(
        [one for one in record["predictions"] if one["hook"] in ("none", "powersgd-4")]
    )
    if key != "efficiency":
        axes.set_yscale("log")
    for color, link in zip(_COLORS, dict.fromkeys(one["link"] for one in found), strict=False):
        for hook, style in (("none", "--"), ("powersgd-4", ":")):
            line = [one for one in found if one["link"] == link and one["hook"] == hook]
            axes.plot(
                [one["ranks"] for one in line],
                [one[key] for one in line],
                style,
                color=color,
                label=f"{link}, {hook}",
            )
    most = max(job["ranks"] for job in record["jobs"])
    axes.axvline(most, color="black", linewidth=0.8)
    axes.annotate(
        f"nothing measured\nbeyond {most} ranks",
        (most, 0.03),
        xycoords=("data", "axes fraction"),
        fontsize="small",
    )
    _finish(axes)


def _markers(axes: Any, found: Sequence[Mapping[str, Any]], key: str) -> None:
    links = dict.fromkeys(one["link"] for one in found)
    for color, link in zip(_COLORS, links, strict=False):
        label: str | None = link or "node"
        for one in (one for one in found if one["link"] == link):
            axes.plot([one["ranks"]], [one[key]], **_marker(one, color), label=label)
            label = None
    _finish(axes)


def _marker(one: Mapping[str, Any], color: str) -> dict[str, Any]:
    filling = "none" if one["oversubscribed"] else color
    return {
        "marker": "o",
        "linestyle": "none",
        "color": color,
        "markerfacecolor": filling,
        "markersize": 5,
    }


def _largest(found: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the entries of each link's last network, which is the largest."""
    last = {one["link"]: one["network"] for one in found}
    return [one for one in found if last[one["link"]] == one["network"]]


def _finish(axes: Any) -> None:
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="x-small")
