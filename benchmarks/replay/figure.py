"""Plot of a replay: weak scaling of each network and job, simulated and by the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness import palette, pictures
from harness.palette import Theme, named

_STYLES = {
    "none": named(palette.OWN, "uncompressed"),
    "bf16": named(palette.BF16, "bf16"),
    "powersgd-4": palette.POWERSGD_4,
}


def draw(record: Mapping[str, Any], theme: Theme) -> Any:
    """Draw the efficiency of weak scaling over the ranks, a panel for each job and network."""
    about = record["assumptions"]
    steps = [one for one in record["steps"] if one["library"] == about["library"]]
    steps = [one for one in steps if one["rate_gbit_s"] == about["rate_gbit_s"]]
    larger = sorted({one["nodes"] for one in steps} - {about["nodes"]})
    networks = "; ".join(f"{nodes} ranks: of {nodes}" for nodes in larger)
    made = pictures.sheet(
        8.6,
        f"SIMULATED weak scaling, SimGrid {record['simgrid']}, {about['rate_gbit_s']:g} Gbit/s, "
        f"{about['latency_us']:g} us a cable",
        "markers: replayed messages; dashed: PREDICTED by the model that is fitted to 2, 4 and 8 "
        "nodes of the same network; one rank a node, MPICH's algorithms; networks of "
        f"{about['nodes']} nodes{f' ({networks})' if networks else ''}",
    )
    cases = list(dict.fromkeys((one["job"], one["network"]) for one in steps))
    for axes, (job, network) in zip(pictures.panels(made, len(cases), 2), cases, strict=True):
        own = [one for one in steps if (one["job"], one["network"]) == (job, network)]
        axes.set_facecolor(theme.shade)
        axes.set(
            title=f"{job}, {network},\n{own[0]['compute_seconds'] * 1e3:.0f} ms computing",
            xlabel="ranks, one a node",
            ylabel="efficiency (1: perfect)",
            xscale="log",
            ylim=(-0.04, 1.05),
        )
        for hook, style in _STYLES.items():
            line = sorted(
                (one for one in own if one["hook"] == hook), key=lambda one: int(one["ranks"])
            )
            ranks = [one["ranks"] for one in line]
            color = style.color(theme)
            axes.plot(
                ranks,
                [one["compute_seconds"] / one["simulated_seconds"] for one in line],
                linestyle="none",
                marker=style.marker,
                color=color,
                label=style.label,
            )
            axes.plot(
                ranks,
                [one["compute_seconds"] / one["predicted_seconds"] for one in line],
                "--",
                color=color,
            )
        axes.set_xticks(ranks, [str(count) for count in ranks])
        axes.minorticks_off()
    pictures.legend(made, 3)
    return made
