"""Results of the demo: a table, and a plot of losses, accuracies and bytes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.console import Console
from rich.table import Table

Row = dict[str, Any]

_WIDTH = 80


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


def draw(results: Sequence[Row], ranks: int, wanted_accuracy: float, path: Path) -> None:
    """Plot the first run of each method."""
    # Without pyplot, matplotlib draws with Agg and needs no display.
    figure = Figure(figsize=(13, 4), layout="constrained")
    figure.suptitle(f"Digits on {ranks} ranks, one line for each communication hook")
    losses, accuracies, sent = figure.subplots(1, 3)
    methods = _by_method(results)
    for name, runs in methods.items():
        epochs = range(1, len(runs[0]["losses"]) + 1)
        losses.plot(epochs, runs[0]["losses"], ".-", label=name, linewidth=1.2)
        accuracies.plot(
            epochs,
            [100 * value for value in runs[0]["accuracies"]],
            ".-",
            label=name,
            linewidth=1.2,
        )
    losses.set(xlabel="epoch", ylabel="training loss (cross-entropy)", yscale="log")
    accuracies.axhline(
        100 * wanted_accuracy, color="grey", linestyle="--", label=f"wanted: {wanted_accuracy:.0%}"
    )
    accuracies.set(xlabel="epoch", ylabel="accuracy (%)", ylim=(80, 100.5))
    accuracies.legend(loc="lower right", fontsize="small")
    bars = sent.bar(
        list(methods),
        [runs[0]["bytes_per_step"] for runs in methods.values()],
        color=[f"C{i}" for i in range(len(methods))],
    )
    rates = [
        f"{runs[0]['uncompressed_bytes'] / runs[0]['bytes_per_step']:.1f}x"
        for runs in methods.values()
    ]
    sent.bar_label(bars, rates)
    sent.set(ylabel="bytes sent a step", yscale="log")
    sent.tick_params(axis="x", rotation=30)
    for axes in (losses, accuracies):
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=150)


def _by_method(results: Sequence[Row]) -> dict[str, list[Row]]:
    methods: dict[str, list[Row]] = {}
    for row in results:
        methods.setdefault(row["method"], []).append(row)
    return methods
