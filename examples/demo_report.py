"""Results of the demo: a table, a plot of it, and a plot of recorded steps on a slow link."""

from __future__ import annotations

import io
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.ticker import MaxNLocator
from rich import box
from rich.console import Console
from rich.table import Table

from mpidist import shipped

# Colours, and records, are those of the benchmarks, in a checkout and in an installed package.
sys.path.append(str(shipped.folder("benchmarks")))
from harness import palette, pictures

Row = dict[str, Any]

_WIDTH = 80
_RESULTS = shipped.folder("benchmarks") / "results"
_STYLES = {
    "allreduce": palette.OWN,
    "fp16": palette.FP16,
    "bf16": palette.BF16,
    "powersgd-1": palette.POWERSGD_1,
    "powersgd-2": palette.POWERSGD_2,
    "powersgd-4": palette.POWERSGD_4,
}
# Steps of one model on one machine: within a node, and over a simulated link of 1 Gbit/s.
_NODE, _LINK = "powersgd-openmpi-2", "powersgd-mpich-2-1gbit"
_MODEL = "MLP 8.4 M, batch 64"
# Of a plot's bars → of the records.
_QUANTILES = {"median": "median", "low": "p10", "high": "p90"}
_RECORDED = (
    "bare", "allreduce_hook", "fp16_compress_hook", "PowerSGD rank 1", "PowerSGD rank 2",
    "PowerSGD rank 4",
)  # fmt: skip


def table(results: Sequence[Row]) -> str:
    """Return one line per method, the mean over its runs, in 80 columns."""
    lines = []
    for name, runs in _by_method(results).items():
        sent = mean(run["bytes_per_step"] for run in runs)
        lines.append(
            (
                name,
                f"{mean(run['accuracies'][-1] for run in runs):.2%}",
                f"{sent:,.0f}",
                f"{runs[0]['uncompressed_bytes'] / sent:.1f}x",
                f"{mean(run['compressed_steps'] / run['steps'] for run in runs):.0%}",
                f"{mean(run['exposed_ms'] for run in runs):.2f}",
                f"{mean(run['samples_per_s'] for run in runs):,.0f}",
                f"{max(runs[0]['state_bytes']) / 1024:,.0f}",
            )
        )
    shown = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 1, 0, 0),
        caption="fewer: bytes of an uncompressed step over those sent, in the given share of the "
        "steps; exposed: what communication adds to a step; state: of the optimizer, on the "
        "fullest rank",
        caption_justify="left",
    )
    headers = (
        "hook", "test\naccuracy", "bytes sent\na step", "times\nfewer", "of the\nsteps",
        "exposed\nms", "samples\na second", "state\nKiB",
    )  # fmt: skip
    for header in headers:
        shown.add_column(header, justify="left" if header == "hook" else "right", no_wrap=True)
    for line in lines:
        shown.add_row(*line)
    # Without colours: Open MPI gives ranks a pseudo terminal even if its output is a file.
    to = Console(file=io.StringIO(), width=_WIDTH, color_system=None)
    to.print(shown)
    return "\n".join(line.rstrip() for line in to.file.getvalue().splitlines())


def explanation(results: Sequence[Row], is_one_node: bool) -> str:
    """Return why compression costs time within one node, and what it saves on a slow link."""
    own = {name: runs[0]["exposed_ms"] for name, runs in _by_method(results).items()}
    compressed = [name for name in own if name.startswith(("fp16", "bf16", "powersgd"))]
    slower = [name for name in compressed if own[name] > own.get("allreduce", float("inf"))]
    parts = []
    if is_one_node and slower:
        size = _by_method(results)["allreduce"][0]["uncompressed_bytes"] / 1024
        parts.append(
            f"{len(slower)} of {len(compressed)} compressing hooks took longer here than the plain "
            f"average. All ranks are on one node, where {size:,.0f} KiB are averaged through "
            f"shared memory in {own['allreduce']:.2f} ms of a step; converting them to 16 bits, or "
            "multiplying and orthogonalizing PowerSGD's matrices, costs the processor more than "
            "that saves."
        )
    node, link = (_recorded(name) for name in (_NODE, _LINK))
    about = link["environment"]
    (plain_ms, rank_4_ms), (plain_link_ms, rank_4_link_ms) = (
        [_steps(one)[name]["median_us"] / 1e3 for name in ("allreduce_hook", "PowerSGD rank 4")]
        for one in (node, link)
    )
    parts.append(
        "Compression wins where bytes cost time. Recorded, not measured now: a step of 8.4 million "
        f"parameters on 2 ranks took {plain_link_ms:.0f} ms uncompressed over a simulated link of "
        f"1 Gbit/s and {rank_4_link_ms:.0f} ms with PowerSGD of rank 4, but {plain_ms:.0f} and "
        f"{rank_4_ms:.0f} ms within one node ({about['cpu']}, {about['logical_cores']} cores, "
        f"{about['date'][:10]})."
    )
    return "\n".join(textwrap.fill(part, _WIDTH) for part in parts)


def draw(results: Sequence[Row], ranks: int, wanted_accuracy: float, path: Path) -> None:
    """Plot the first run of each method."""
    data = {"results": results, "ranks": ranks, "wanted": wanted_accuracy}
    pictures.write(training_figure, data, path, json.dumps(data).encode(), [palette.LIGHT])


def draw_link(path: Path) -> None:
    """Plot recorded steps within one node and over a link of 1 Gbit/s."""
    source = b"".join((_RESULTS / f"{name}.json").read_bytes() for name in (_NODE, _LINK))
    pictures.write(link_figure, {}, path, source, [palette.LIGHT])


def training_figure(data: Mapping[str, Any], theme: palette.Theme) -> Any:
    figure = pictures.sheet(
        7.2,
        f"Digits on {data['ranks']} ranks, one line for each communication hook",
        "bytes: what a rank passes to the reduction in a compressed step",
    )
    above, below = figure.subfigures(2, 1, height_ratios=(1.6, 1))
    losses, accuracies = pictures.panels(above, 2, 2)
    (sent,) = pictures.panels(below, 1, 1)
    methods = _by_method(data["results"])
    styles = {name: style_of(name) for name in methods}
    for place, (name, runs) in enumerate(methods.items()):
        epochs = range(1, len(runs[0]["losses"]) + 1)
        percent = [100 * value for value in runs[0]["accuracies"]]
        for axes, values in ((losses, runs[0]["losses"]), (accuracies, percent)):
            drawn = pictures.line(axes, theme, styles[name], epochs, values)
            # The markers of lines on top of each other stand side by side.
            drawn.set_markevery((place % len(epochs), len(methods)))
    losses.set(xlabel="epoch", ylabel="training loss (nats)", yscale="log")
    accuracies.axhline(
        100 * data["wanted"], color=theme.ink, linestyle="--", linewidth=1,
        label=f"required: {data['wanted']:.0%}",
    )  # fmt: skip
    accuracies.set(xlabel="epoch", ylabel="test accuracy, %", ylim=(80, 100.5))
    for axes in (losses, accuracies):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    pictures.legend(above, 4)
    values = [runs[0]["bytes_per_step"] / 1024 for runs in methods.values()]
    whole = [runs[0]["uncompressed_bytes"] / 1024 for runs in methods.values()]
    pictures.bars(
        sent,
        theme,
        list(styles.values()),
        [{"median": one, "low": one, "high": one} for one in values],
    )
    for place, (one, all_of_it) in enumerate(zip(values, whole, strict=True)):
        sent.annotate(
            f"{all_of_it / one:.1f} times fewer" if one < all_of_it else "all",
            (one, -place), xytext=(4, 0), textcoords="offset points", verticalalignment="center",
        )  # fmt: skip
    sent.set(xlabel="KiB a step", xscale="log", xlim=(None, 6 * max(values)))
    return figure


def link_figure(_: Mapping[str, Any], theme: palette.Theme) -> Any:
    node, link = (_recorded(name) for name in (_NODE, _LINK))
    about = link["environment"]
    figure = pictures.sheet(
        3.6,
        f"Where compression wins: RECORDED steps of {_MODEL}",
        f"not measured by this demo; 2 ranks on {about['cpu']}, {about['logical_cores']} cores, "
        f"{about['date'][:10]}; median, p10 to p90; dashed: no communication",
    )
    titles = ("within one node", "over 1 Gbit/s, simulated")
    for axes, record, title in zip(
        pictures.panels(figure, 2, 2), (node, link), titles, strict=True
    ):
        steps = _steps(record)
        pictures.bars(
            axes,
            theme,
            [palette.contender("powersgd", name) for name in steps],
            [
                {key: one[f"{key_us}_us"] / 1e3 for key, key_us in _QUANTILES.items()}
                for one in steps.values()
            ],
        )
        axes.axvline(steps["bare"]["median_us"] / 1e3, color=theme.ink, linewidth=1, linestyle="--")
        library = record["environment"]["mpi_library"]
        axes.set(title=f"{title}, {library}", xlabel="ms a step")
    axes.tick_params(axis="y", labelleft=False)
    return figure


def _recorded(name: str) -> Mapping[str, Any]:
    return json.loads((_RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _steps(record: Mapping[str, Any]) -> dict[str, Any]:
    (found,) = (one for one in record["results"] if one["model"] == _MODEL)
    return {name: found["contenders"][name] for name in _RECORDED}


def style_of(method: str) -> palette.Style:
    """Return the style of a hook, with a sharded optimizer or a whole one."""
    hook, _, optimizer = method.partition(", ")
    return (
        palette.sharded(_STYLES[hook], method)
        if optimizer
        else palette.named(_STYLES[hook], method)
    )


def _by_method(results: Sequence[Row]) -> dict[str, list[Row]]:
    methods: dict[str, list[Row]] = {}
    for row in results:
        methods.setdefault(row["method"], []).append(row)
    return methods
