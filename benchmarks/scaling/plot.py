"""Plot of a scaling report: measured points as markers, predictions in shaded panels."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from harness import environment, pictures
from harness.palette import SERIES, Style, Theme, named
from scaling import model as models
from scaling.cost_model import Point

_HOOKS = {"none": "--", "powersgd-4": ":"}
_Links: TypeAlias = Mapping[str, Style]


def draw(record: Mapping[str, Any], theme: Theme) -> Any:
    """Draw measured steps and all-reduces, held-out points, and predictions."""
    about = record["jobs"][0]["environment"]
    libraries = sorted({job["environment"]["mpi_library"] for job in record["jobs"]})
    made = pictures.sheet(
        11.8,
        f"Scaling of a data-parallel step: {environment.processor(about)}, torch "
        f"{about['torch'].partition('+')[0]}, {', '.join(libraries)}",
        "filled: a core for each rank, hollow: more ranks than cores; shaded: PREDICTED by the "
        "model, not measured, dashed: uncompressed, dotted: PowerSGD of rank 4",
    )
    panels = pictures.panels(made, 6, 2)
    links = _links(record)
    _weak(panels[0], theme, links, record)
    _strong(panels[1], theme, links, record)
    _all_reduce(panels[2], theme, links, record)
    _held_out(panels[3], theme, links, record)
    _predicted(panels[4], theme, links, record, "predicted_seconds", "s a step")
    _predicted(panels[5], theme, links, record, "efficiency", "efficiency (1: perfect)")
    pictures.legend(made, 5)
    return made


def _links(record: Mapping[str, Any]) -> _Links:
    """Return a style for each link, in the jobs' order: a node's memory, then by falling rate."""
    names = dict.fromkeys(job["link"] for job in record["jobs"])
    return {
        name: named(style, environment.link_text(name) if name else "one node")
        for name, style in zip(names, itertools.cycle(SERIES[:-1]))
    }


def _weak(axes: Any, theme: Theme, links: _Links, record: Mapping[str, Any]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set(
        title="weak scaling, uncompressed,\nlargest network",
        xlabel="ranks",
        ylabel="s a step",
        yscale="log",
    )
    found = [one for one in record["steps"] if one["scaling"] == "weak" and one["hook"] == "none"]
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    _points(axes, theme, links, _largest(found), "seconds")


def _strong(axes: Any, theme: Theme, links: _Links, record: Mapping[str, Any]) -> None:
    axes.set(
        title="strong scaling, uncompressed,\nlargest network",
        xlabel="ranks",
        ylabel="efficiency (1: perfect)",
        ylim=(-0.04, 1.05),
    )
    known = [
        one
        for one in record["steps"]
        if one["scaling"] == "strong" and one["efficiency"] is not None
    ]
    _points(axes, theme, links, _largest(known), "efficiency")


def _all_reduce(axes: Any, theme: Theme, links: _Links, record: Mapping[str, Any]) -> None:
    axes.set(
        title="all-reduce of 2 ranks:\nmeasured, and the model's lines",
        xlabel="bytes",
        ylabel="s a call",
        xscale="log",
        yscale="log",
    )
    model = models.from_json(record["model"])
    for job in record["jobs"]:
        if job["ranks"] != 2:
            continue
        style, at = links[job["link"]], models.layout_of(job)
        found = [one for one in job["collectives"] if one["operation"] == "all_reduce"]
        sizes = [one["nbytes"] for one in found]
        _scatter(
            axes, theme, style, sizes, [one["us"] / 1e6 for one in found], job["oversubscribed"]
        )
        fit = model.fits.get(models.NODE if at.nodes == 1 else models.BETWEEN, {}).get("all_reduce")
        if fit is not None:
            points = [
                Point("all_reduce", at.nodes, at.ranks_per_node, size, at.rate_gbit_s, at.share)
                for size in sizes
            ]
            seconds = [fit.seconds(point) for point in points]
            axes.plot(sizes, seconds, "-", color=style.color(theme), linewidth=1)


def _held_out(axes: Any, theme: Theme, links: _Links, record: Mapping[str, Any]) -> None:
    middle = record["validation"]["median_error"]
    error_text = "" if middle is None else f":\nmedian error {middle:.0%}"
    axes.set(
        title=f"points that the model was not fitted to{error_text}",
        xlabel="measured, s",
        ylabel="predicted, s",
        xscale="log",
        yscale="log",
    )
    for name, style in (
        (models.NODE, links.get("", SERIES[0])),
        (models.BETWEEN, named(SERIES[-1], "between nodes")),
    ):
        found = [one for one in record["held_out"] if one["class"] == name]
        axes.plot(
            [one["seconds"] for one in found],
            [one["predicted_seconds"] for one in found],
            style.marker,
            color=style.color(theme),
            markersize=4,
            alpha=0.6,
            markeredgewidth=0,
            label=style.label,
        )
    ends = [min((one["seconds"] for one in record["held_out"]), default=1e-5)]
    ends.append(max((one["seconds"] for one in record["held_out"]), default=1.0))
    axes.plot(ends, ends, "-", color=theme.ink, linewidth=0.8)


def _predicted(
    axes: Any, theme: Theme, links: _Links, record: Mapping[str, Any], key: str, label: str
) -> None:
    most = max(job["ranks"] for job in record["jobs"])
    axes.set_facecolor(theme.shade)
    axes.set(
        title=f"PREDICTED, weak scaling; nothing\nmeasured beyond the line, {most} ranks",
        xlabel="ranks, one a node",
        ylabel=label,
        xscale="log",
    )
    found = _largest([one for one in record["predictions"] if one["hook"] in _HOOKS])
    if key == "efficiency":
        axes.set_ylim(-0.04, 1.05)
    else:
        axes.set_yscale("log")
    for link, hook in dict.fromkeys((one["link"], one["hook"]) for one in found):
        line = [one for one in found if one["link"] == link and one["hook"] == hook]
        axes.plot(
            [one["ranks"] for one in line],
            [one[key] for one in line],
            _HOOKS[hook],
            color=links[link].color(theme),
        )
    axes.axvline(most, color=theme.ink, linewidth=0.8)


def _points(
    axes: Any, theme: Theme, links: _Links, found: Sequence[Mapping[str, Any]], key: str
) -> None:
    for one in found:
        style = links[one["link"]]
        _scatter(axes, theme, style, [one["ranks"]], [one[key]], one["oversubscribed"])


def _scatter(
    axes: Any,
    theme: Theme,
    style: Style,
    places: Sequence[float],
    values: Sequence[float],
    is_hollow: bool,
) -> None:
    color = style.color(theme)
    axes.plot(
        places,
        values,
        linestyle="none",
        marker=style.marker,
        color=color,
        markerfacecolor="none" if is_hollow else color,
        # A hollow one is explained above the panels.
        label=None if is_hollow else style.label,
    )


def _largest(found: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the entries of each link's last network, which is the largest."""
    last = {one["link"]: one["network"] for one in found}
    return [one for one in found if last[one["link"]] == one["network"]]
