"""Kernel results as table rows, JSON, verdicts of goals, and a plot."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import environment
import kernel_cases as copies
import powersgd_cases as powersgd
from collective_goals import format_bytes
from timing import Series, compare

_MI = 1 << 20
_COLORS = {
    copies.OURS: "tab:blue",
    copies.THEIRS: "tab:red",
    copies.COPY: "tab:grey",
    powersgd.KERNELS: "tab:cyan",
    powersgd.OURS: "tab:blue",
    powersgd.THEIRS: "tab:red",
    powersgd.BATCHED: "tab:orange",
}


# --- the JSON's entries ---


def copy_result(
    case: copies.Case,
    issued: Mapping[str, Series],
    alone: Mapping[str, Series],
    behind: Collection[str],
) -> dict[str, Any]:
    """Return one case's entry in the JSON.

    Args:
        issued: Times of a burst on an idle device, with the host's part.
        alone: Times of the device's work; equal to ``issued`` on the CPU.
        behind: Names of contenders whose ``alone`` includes the host's part.
    """
    return {
        "operation": case.operation,
        "tensors_of": case.tensors_of,
        "tensors": case.tensors,
        "dtypes": case.dtypes,
        "size_bytes": case.size_bytes,
        "moved_bytes": case.moved_bytes,
        "contenders": {
            name: {
                "device": _times(series),
                "waits_for_host": name in behind,
                "issued": _times(issued[name]),
                "bytes_per_s": case.moved_bytes / series.median_us * 1e6,
                "over_copy": compare(alone[copies.COPY], series).ratio_of_rounds,
            }
            for name, series in alone.items()
        },
    }


def powersgd_result(
    case: powersgd.Case, issued: Mapping[str, Series], alone: Series | None, copy_rate: float | None
) -> dict[str, Any]:
    """Return the entry of one list at one rank.

    Args:
        alone: The device's time of the kernels.
        copy_rate: Bytes per second of the device's copy.
    """
    fewest_us = case.moved_bytes / copy_rate * 1e6 if copy_rate else None
    kernels = alone or issued[powersgd.KERNELS]
    return {
        "tensors_of": case.tensors_of,
        "rank": case.rank,
        "buckets": case.buckets,
        "tensors": case.tensors,
        "matrices": case.matrices,
        "numel": case.numel,
        "fewest_bytes": case.moved_bytes,
        # Time of the fewest bytes at the copy's rate.
        "fewest_us": fewest_us,
        "kernels_on_device": _times(kernels),
        "kernels_over_fewest": kernels.median_us / fewest_us if fewest_us else None,
        "launches_per_bucket": case.launches,
        "contenders": {
            name: {
                "issued": _times(one),
                "torchs_over_it": compare(issued[powersgd.THEIRS], one).ratio_of_rounds,
            }
            for name, one in issued.items()
        },
    }


def memory_rate(results: Sequence[dict[str, Any]]) -> float | None:
    """Return the bytes per second of the largest device copy, which no cache accelerates."""
    largest = max((result["size_bytes"] for result in results), default=0)
    rates = [
        r["contenders"][copies.COPY]["bytes_per_s"] for r in results if r["size_bytes"] == largest
    ]
    return max(rates, default=None)


def _times(series: Series) -> dict[str, Any]:
    return {
        "median_us": series.median_us,
        "p10_us": series.percentile_us(10),
        "p90_us": series.percentile_us(90),
        "rounds_us": [float(f"{value:.5g}") for value in series.rounds_us],
    }


# --- rows ---


def copy_row(result: dict[str, Any]) -> str:
    """Return one line: rates of bytes read and written, absolute and relative to the copy."""
    parts = []
    for name, values in result["contenders"].items():
        details = f"{values['over_copy']:.2f}, {values['issued']['median_us']:.0f} us issued"
        parts.append(f"{name} {values['bytes_per_s'] / 1e9:.1f} GB/s ({details})")
    what = (
        f"{result['operation']:10} {result['tensors_of']:10} {result['tensors']:4} tensors "
        f"{result['dtypes']:18}"
    )
    return f"{what} {format_bytes(result['size_bytes']):>7}  {'  '.join(parts)}"


def powersgd_row(result: dict[str, Any]) -> str:
    """Return one line: milliseconds over all buckets."""
    parts = [
        f"{name} {values['issued']['median_us'] / 1e3:.2f}"
        for name, values in result["contenders"].items()
    ]
    fewest = (
        "" if result["fewest_us"] is None else f"  fewest bytes {result['fewest_us'] / 1e3:.2f}"
    )
    on_device = f"  kernels on the device {result['kernels_on_device']['median_us'] / 1e3:.2f}"
    return (
        f"PowerSGD {result['tensors_of']:10} rank {result['rank']} ms:  "
        f"{'  '.join(parts)}{on_device}{fewest}"
    )


# --- the plot ---


def draw(record: dict[str, Any], path: Path) -> None:
    """Plot rates over sizes above, and PowerSGD's times below."""
    from matplotlib.figure import Figure

    operations = list(
        dict.fromkeys((r["operation"], r["tensors_of"], r["dtypes"]) for r in record["copies"])
    )
    lists = list(dict.fromkeys(r["tensors_of"] for r in record["powersgd"]))
    columns = max(-(-len(operations) // 2), len(lists), 1)
    figure = Figure(figsize=(3.4 * columns, 10), layout="constrained")
    about = record["environment"]
    figure.suptitle(
        f"Kernels on {environment.processor(about)}, torch {about['torch']}; median of "
        f"{record['rounds']} rounds and p10–p90",
        fontsize="medium",
    )
    panels = figure.subplots(3, columns, squeeze=False)
    for axes, operation in zip(panels[:2].ravel().tolist(), operations, strict=False):
        chosen = [
            r
            for r in record["copies"]
            if (r["operation"], r["tensors_of"], r["dtypes"]) == operation
        ]
        _draw_rates(axes, ", ".join(operation), chosen)
    for axes, name in zip(panels[2].tolist(), lists, strict=False):
        _draw_times(
            axes,
            name,
            sorted(
                (r for r in record["powersgd"] if r["tensors_of"] == name), key=lambda r: r["rank"]
            ),
        )
    for axes in panels.ravel().tolist():
        if not axes.has_data():
            figure.delaxes(axes)
    handles = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw_rates(axes: Any, title: str, results: Sequence[dict[str, Any]]) -> None:
    sizes = [result["size_bytes"] / _MI for result in results]
    for name in results[0]["contenders"]:
        moved = [result["moved_bytes"] / 1e3 for result in results]  # divided by microseconds: GB/s
        times = [result["contenders"][name]["device"] for result in results]
        axes.plot(
            sizes,
            [m / t["median_us"] for m, t in zip(moved, times, strict=True)],
            ".-",
            color=_COLORS[name],
            label=name,
        )
        low, high = (
            [m / t[key] for m, t in zip(moved, times, strict=True)] for key in ("p90_us", "p10_us")
        )
        axes.fill_between(sizes, low, high, color=_COLORS[name], alpha=0.2, linewidth=0)
    axes.set_title(title, fontsize="small")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.set(xlabel="MiB of tensors", ylabel="GB/s read and written", ylim=(0, None))
    axes.grid(alpha=0.3)


def _draw_times(axes: Any, title: str, results: Sequence[dict[str, Any]]) -> None:
    names = list(results[0]["contenders"])
    for place, name in enumerate(names):
        places = [row + (place - len(names) / 2) * 0.2 for row in range(len(results))]
        times = [result["contenders"][name]["issued"] for result in results]
        medians = [t["median_us"] / 1e3 for t in times]
        spread = [
            [max(m - t["p10_us"] / 1e3, 0) for m, t in zip(medians, times, strict=True)],
            [max(t["p90_us"] / 1e3 - m, 0) for m, t in zip(medians, times, strict=True)],
        ]
        axes.bar(
            places,
            medians,
            0.2,
            align="edge",
            yerr=spread,
            color=_COLORS[name],
            label=name,
            capsize=2,
        )
    if all(result["fewest_us"] for result in results):
        fewest = [result["fewest_us"] / 1e3 for result in results]
        axes.plot(
            range(len(results)),
            fewest,
            "_k",
            markersize=24,
            label="fewest bytes at the copy's rate",
        )
    axes.set_title(f"PowerSGD of {title}", fontsize="small")
    axes.set_xticks(range(len(results)), [f"rank {result['rank']}" for result in results])
    axes.set_yscale("log")
    axes.set(ylabel="ms, all buckets")
    axes.grid(axis="y", alpha=0.3)
