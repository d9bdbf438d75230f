"""Figure of a record of calls: lines over sizes and counts, a row of marks for each other call.

A call of one size is a row: lines of one point cannot be compared, and a panel of bars for each of
a dozen calls takes pages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from harness import environment, palette, pictures, report
from harness.goals import format_bytes
from harness.palette import Theme

_Results: TypeAlias = Sequence[dict[str, Any]]

# Calls whose names differ by a number: their panel's title, and the label of its axis.
_COUNTED = {
    "autograd": (r"(\d+) layers?", "forward and backward pass", "number of layers"),
    "messages": (r"(\d+) posted tags", "receives posted ahead, 8 B", "number of tags"),
}
_TITLES = {
    "allocate": "Node memory",
    "autograd": "Distributed autograd",
    "messages": "Messages",
    "rpc": "RPC",
}
_UNITS = {"autograd": "µs a pass", "messages": "µs a message"}
# Operations whose names in the records say too little above a panel.
_OPERATIONS = {
    "reference": "value of a remote reference",
    "tensor of many": "a tensor of 64 B among others",
    "unshard": "FSDP2's unsharding",
}
# Marks of a logarithmic axis that spans fewer decades get numbers at 2 and 5 as well.
_FEW = 30


def draw(record: Mapping[str, Any], theme: Theme) -> Any:
    """Draw a panel of lines for each operation of several sizes, and one of marks for the rest."""
    benchmark, about = record["benchmark"], record["environment"]
    sized, counted, single = _sorted(benchmark, record["results"])
    lines = len(sized) + bool(counted)
    columns = 2 if lines in (2, 4) else max(min(lines, 3), 1)
    # Of one or two panels each is higher than of three beside each other.
    heights = (
        (2.6 if columns > 2 else 3.4) * -(-lines // columns) + 1.2,
        0.34 * len(single) + (1.0 if lines else 2.2),
    )
    made = pictures.sheet(
        bool(lines) * heights[0] + bool(single) * heights[1],
        environment.title(record, f"{_TITLES[benchmark]}, {about['ranks']} ranks"),
        f"median of {record['rounds'] * record.get('blocks', 1)} rounds, p10 to p90; "
        f"{environment.binding(about).split(':')[0]}",
    )
    above, below = made, made
    if lines and single:
        above, below = made.subfigures(2, 1, height_ratios=heights)
    panels = pictures.panels(above, lines, columns) if lines else []
    for axes, (operation, results) in zip(panels, sized.items(), strict=False):
        axes.set_title(_OPERATIONS.get(operation, operation))
        report.draw_lines(axes, theme, benchmark, results)
        axes.set_ylabel(_unit(benchmark, operation))
    if counted:
        _draw_counts(panels[-1], theme, benchmark, counted)
    if single:
        (axes,) = pictures.panels(below, 1, 1)
        _draw_rows(axes, theme, benchmark, single)
    pictures.legend(above if lines else below, 3, of=made)
    return made


def _sorted(benchmark: str, results: _Results) -> tuple[dict[str, _Results], _Results, _Results]:
    """Return the results of several sizes by operation, those of several counts, and the others."""
    pattern = _COUNTED.get(benchmark, ("(?!)",))[0]
    counted = [one for one in results if re.fullmatch(pattern, one["operation"])]
    others = [one for one in results if one not in counted]
    by_name: dict[str, list[dict[str, Any]]] = {}
    for one in others:
        if one["size_bytes"]:
            by_name.setdefault(one["operation"], []).append(one)
    sized = {name: own for name, own in by_name.items() if len(own) > 1}
    return dict(sized), counted, [one for one in others if one["operation"] not in sized]


def _draw_counts(axes: Any, theme: Theme, benchmark: str, results: _Results) -> None:
    pattern, title, label = _COUNTED[benchmark]
    counts = [int(re.fullmatch(pattern, one["operation"])[1]) for one in results]
    report.draw_series(axes, theme, benchmark, results, counts)
    axes.set(title=title, xscale="log", yscale="log", xlabel=label)
    axes.set_ylabel(_unit(benchmark))
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    _number(axes.yaxis)


def _draw_rows(axes: Any, theme: Theme, benchmark: str, results: _Results) -> None:
    """Draw a row for each call: a mark for each contender, with a line from p10 to p90."""
    for place, one in enumerate(results):
        for name, values in one["contenders"].items():
            style = palette.contender(benchmark, name)
            axes.plot(
                [values["p10_us"], values["p90_us"]],
                [-place, -place],
                color=style.color(theme),
                linewidth=2,
                solid_capstyle="butt",
            )
            (mark,) = axes.plot(
                [values["median_us"]],
                [-place],
                style.marker,
                color=style.color(theme),
                markersize=7,
                markeredgewidth=0,
            )
            mark.set_label(style.label)
    labels = [
        one["operation"] + (f", {format_bytes(one['size_bytes'])}" if one["size_bytes"] else "")
        for one in results
    ]
    axes.set_yticks([-place for place in range(len(results))], labels)
    axes.set(xscale="log", xlabel=_unit(benchmark), ylim=(0.6 - len(results), 0.4))
    axes.minorticks_off()
    _number(axes.xaxis)


def _unit(benchmark: str, operation: str = "") -> str:
    if operation == "tensor of many":
        return "µs a tensor"
    return _UNITS.get(benchmark, "µs a call")


def _number(axis: Any) -> None:
    """Give a short logarithmic axis more than one number."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    low, high = axis.get_view_interval()
    if high < _FEW * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
