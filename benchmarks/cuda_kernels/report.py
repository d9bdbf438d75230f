"""Kernel results as table rows, JSON, verdicts of goals, and a plot."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cuda_kernels import cases as copies
from cuda_kernels import powersgd_cases as powersgd
from harness import environment, palette, pictures
from harness.goals import format_bytes
from harness.palette import Theme
from harness.timing import Series, compare

_MI = 1 << 20
_COLUMNS = 3
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


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


def draw(record: Mapping[str, Any], theme: Theme) -> Any:
    """Draw rates over sizes above, and PowerSGD's times below."""
    operations = list(
        dict.fromkeys((r["operation"], r["tensors_of"], r["dtypes"]) for r in record["copies"])
    )
    lists = list(dict.fromkeys(r["tensors_of"] for r in record["powersgd"]))
    above = -(-len(operations) // _COLUMNS)
    below = -(-len(lists) // _COLUMNS)
    about = record["environment"]
    made = pictures.sheet(
        2.4 * (above + below) + 1.8,
        f"Kernels on {environment.processor(about)}, torch {about['torch'].partition('+')[0]}",
        f"median of {record['rounds']} rounds, p10 to p90; above: rate of reading and writing "
        "a list of gradients; below: PowerSGD of all gradients, without a network",
    )
    panels = pictures.panels(made, _COLUMNS * (above + below), _COLUMNS)
    rates, times = panels[: _COLUMNS * above], panels[_COLUMNS * above :]
    for axes, operation in zip(rates, operations, strict=False):
        chosen = [
            r
            for r in record["copies"]
            if (r["operation"], r["tensors_of"], r["dtypes"]) == operation
        ]
        _draw_rates(axes, theme, _title(*operation), chosen)
    for axes, name in zip(times, lists, strict=False):
        found = [r for r in record["powersgd"] if r["tensors_of"] == name]
        _draw_times(axes, theme, name, sorted(found, key=lambda r: r["rank"]))
    for axes in panels:
        if not axes.has_data():
            made.delaxes(axes)
    pictures.legend(made, 3)
    return made


def _title(operation: str, tensors_of: str, dtypes: str) -> str:
    tensors, flat = (_SHORT.get(dtype, dtype) for dtype in dtypes.split(", "))
    return f"{operation}: {tensors_of}\n{tensors} tensors, {flat} buffer"


def _draw_rates(axes: Any, theme: Theme, title: str, results: Sequence[dict[str, Any]]) -> None:
    sizes = [result["size_bytes"] / _MI for result in results]
    for name in results[0]["contenders"]:
        moved = [result["moved_bytes"] / 1e3 for result in results]  # divided by microseconds: GB/s
        times = [result["contenders"][name]["device"] for result in results]
        median, low, high = (
            [m / t[key] for m, t in zip(moved, times, strict=True)]
            for key in ("median_us", "p90_us", "p10_us")
        )
        style = palette.contender("kernels", name)
        pictures.line(axes, theme, style, sizes, median)
        pictures.band(axes, theme, style, sizes, low, high)
    axes.set_title(title)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.set(xlabel="MiB of tensors", ylabel="GB/s", ylim=(0, None))


def _draw_times(axes: Any, theme: Theme, title: str, results: Sequence[dict[str, Any]]) -> None:
    names = list(results[0]["contenders"])
    for place, name in enumerate(names):
        places = [row + (place - len(names) / 2) * 0.2 for row in range(len(results))]
        times = [result["contenders"][name]["issued"] for result in results]
        medians = [t["median_us"] / 1e3 for t in times]
        spread = [
            [max(m - t["p10_us"] / 1e3, 0) for m, t in zip(medians, times, strict=True)],
            [max(t["p90_us"] / 1e3 - m, 0) for m, t in zip(medians, times, strict=True)],
        ]
        style = palette.contender("kernels", name)
        drawn = axes.bar(
            places,
            medians,
            0.2,
            align="edge",
            yerr=spread,
            color=style.color(theme),
            edgecolor=style.edge(theme),
            hatch=style.hatch,
            ecolor=theme.ink,
            label=style.label,
            capsize=2,
        )
        pictures.outline_whiskers(drawn, theme)
    if all(result["fewest_us"] for result in results):
        # Below the bars: a limit that nothing can pass.
        axes.plot(
            range(len(results)),
            [result["fewest_us"] / 1e3 for result in results],
            "_",
            color=theme.ink,
            markersize=22,
            markeredgewidth=2,
            label="fewest bytes at the copy's rate",
        )
    axes.set_title(f"PowerSGD: {title}")
    axes.set_xticks(range(len(results)), [str(result["rank"]) for result in results])
    axes.set_yscale("log")
    axes.set(xlabel="rank of PowerSGD", ylabel="ms, all buckets")
    axes.grid(visible=False, axis="x")
