"""Benchmark records as Markdown: machine, tables, plot.

All numbers are from the JSON.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Tables name contenders as plots do.
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from harness import palette

Record = Mapping[str, Any]
# Ours and a peer, whose ratio stands beside their times, by benchmark.
_PEERS = {
    "collectives": (("mpidist", "gloo"), ("native", "mpi4py")),
    "messages": (("mpidist", "gloo"), ("native", "mpi4py")),
    "allocate": (("node memory", "gloo"),),
    "ddp": (("mpidist", "torch on Gloo"), ("torch on mpidist", "torch on Gloo")),
    "powersgd": (
        ("allreduce_hook", "torch on mpidist"),
        ("PowerSGD rank 4", "torch's PowerSGD rank 4"),
    ),
    "owners": (("to_owners", "mpidist"),),
    "device": (("ring", "library"), ("ring", "staged")),
    "rpc": (("mpidist", "tensorpipe"), ("mpidist", "floor"), ("mpidist", "ping-pong")),
    "autograd": (("mpidist", "tensorpipe"),),
    "oss": (
        ("mpidist", "FairScale on Gloo"),
        ("mpidist, memory used again", "FairScale on Gloo"),
        ("torch on mpidist", "torch on Gloo"),
    ),
    "kernels": (("powerSGD_hook", "torch's hook"),),
}
_LINKS = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s"}


def time_text(us: float) -> str:
    """Return a time of three digits with its unit."""
    for limit, unit in ((1e3, "µs"), (1e6, "ms"), (float("inf"), "s")):
        if us < limit:
            value = us / (limit / 1e3) if limit < float("inf") else us / 1e6
            return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"
    raise AssertionError(us)


def link_text(link: str) -> str:
    """Return a link's name as its rate."""
    return _LINKS.get(link, link)


def bytes_text(size: float) -> str:
    """Return a size in the largest binary unit in which it is at least one."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}" if size % 1 else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is left-aligned, others right-aligned."""
    lines = [headers, ["---", *["---:"] * (len(headers) - 1)], *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def machine(record: Record) -> str:
    """Return one line about the machine of a record."""
    about = record.get("environment") or record["jobs"][0]["environment"]
    cores = f"{about['logical_cores']} cores"
    ranks = (
        "" if "jobs" in record else f"{about['ranks']} rank{'s' if about['ranks'] > 1 else ''}, "
    )
    link = record.get("link")
    places = f"over a simulated link of {link_text(link)}, " if link else ""
    device = f"{about['device']['name']}, " if about.get("device") else ""
    return (
        f"{ranks}{places}{device}{about['mpi_library']}, torch {about['torch']}, "
        f"{about['cpu']}, {cores}, {about['date'][:10]}"
    )


def tables(record: Record, choice: Mapping[str, Sequence[str]] | None = None) -> str:
    """Return the tables of a record.

    Args:
        record: Record of a benchmark.
        choice: ``operations``, ``sizes`` (bytes), ``models`` or ``contenders`` to show.

    Raises:
        ValueError: The record has an unknown form, or contains nothing of the choice.
    """
    choice = choice or {}
    if "rows" in record:
        return _rank_order(record)
    if "jobs" in record:
        return _scale(record)
    if "powersgd" in record and "copies" in record:
        return _kernels(record)
    if "consolidation_ms" in record:
        return _saving(record)
    results = record.get("results") or []
    if results and "model" in results[0]:
        return _steps(
            record,
            [
                _contending(one, choice)
                for one in results
                if _chosen(choice, "models", one["model"])
            ],
        )
    if results and "operation" in results[0]:
        chosen = [one for one in results if _chosen(choice, "operations", one["operation"])]
        return _operations(
            record,
            [
                _contending(one, choice)
                for one in chosen
                if _chosen(choice, "sizes", str(one["size_bytes"]))
            ],
        )
    if results and all(isinstance(value, (str, int, float)) for value in results[0].values()):
        return table(
            list(results[0]), [[_plain(value) for value in one.values()] for one in results]
        )
    raise ValueError(f"no table is known for a record with {', '.join(record)}")


def section(
    name: str, record: Record, has_plot: bool, choice: Mapping[str, Sequence[str]] | None = None
) -> str:
    """Return a record's machine, tables, link to the JSON, and plot (except with ``plot=no``)."""
    parts = [
        f"*{machine(record)}.* [{name}.json](../benchmarks/results/{name}.json)",
        tables(record, choice),
    ]
    if has_plot and "plot" not in (choice or {}):
        parts.append(plot(name))
    return "\n\n".join(parts)


def plot(name: str) -> str:
    """Return the light and the dark picture of a record; the theme shows one of them."""
    return " ".join(
        f"![Plot of {name}](../benchmarks/results/{name}{dark}.png#only-{theme})"
        for theme, dark in (("light", ""), ("dark", "-dark"))
    )


def parse(marker: str) -> tuple[str, dict[str, list[str]]]:
    """Split a marker's text, ``name key=a,b key="c, d;e"``, into a record's name and a choice."""
    name, _, rest = marker.strip().partition(" ")
    found = re.findall(r'(\w+)=("[^"]*"|\S+)', rest)
    # Quoted values may contain commas and blanks.
    return name, {
        key: value[1:-1].split(";") if value.startswith('"') else value.split(",")
        for key, value in found
    }


def _chosen(choice: Mapping[str, Sequence[str]], key: str, value: str) -> bool:
    return key not in choice or value in choice[key]


def _contending(result: Record, choice: Mapping[str, Sequence[str]]) -> Record:
    return {
        **result,
        "contenders": {
            name: one
            for name, one in result["contenders"].items()
            if _chosen(choice, "contenders", name)
        },
    }


def _plain(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _label(record: Record, name: str) -> str:
    return palette.contender(str(record.get("benchmark", "")), name).label


def _pairs(record: Record, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of ours and a peer of which a table shows both."""
    pairs = _PEERS.get(str(record.get("benchmark", "")), ())
    return [pair for pair in pairs if set(pair) <= set(names)]


def _ratio(contenders: Mapping[str, Any], ours: str, peer: str) -> str:
    if ours not in contenders or peer not in contenders:
        return ""
    ratio = contenders[ours]["median_us"] / contenders[peer]["median_us"]
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def _operations(record: Record, results: Sequence[Record]) -> str:
    if not results:
        raise ValueError("the choice leaves no row of the record")
    names = list(dict.fromkeys(name for one in results for name in one["contenders"]))
    pairs = _pairs(record, names)
    rows = []
    for one in results:
        times = [one["contenders"].get(name) for name in names]
        size = f", {bytes_text(one['size_bytes'])}" if one["size_bytes"] else ""
        rows.append(
            [
                one["operation"] + size,
                *("" if each is None else time_text(each["median_us"]) for each in times),
                # The floor of a call has no payload.
                *(
                    "" if pair[1] == "floor" and size else _ratio(one["contenders"], *pair)
                    for pair in pairs
                ),
            ]
        )
    labels = [_label(record, name) for name in names]
    ratios = [" / ".join(_label(record, name) for name in pair) for pair in pairs]
    return table(["median time", *labels, *ratios], rows)


def _steps(record: Record, results: Sequence[Record]) -> str:
    if not results:
        raise ValueError("the choice leaves no model of the record")
    names = list(dict.fromkeys(name for one in results for name in one["contenders"]))
    sends = any("bytes_sent" in values for one in results for values in one["contenders"].values())
    rows = []
    for name in names:
        row = [_label(record, name)]
        for one in results:
            values = one["contenders"].get(name)
            row.append("" if values is None else time_text(values["median_us"]))
        if sends:
            row.append(bytes_text(results[0]["contenders"].get(name, {}).get("bytes_sent", 0)))
        rows.append(row)
    for pair in _pairs(record, names):
        ratios = [_ratio(one["contenders"], *pair) for one in results]
        label = " / ".join(_label(record, name) for name in pair)
        rows.append([label, *ratios, *([""] if sends else [])])
    return table(
        [
            "step, median",
            *(one["model"] for one in results),
            *(["sent by a rank"] if sends else []),
        ],
        rows,
    )


def _rank_order(record: Record) -> str:
    columns = ("mpi4py_us", "plain_us", "order_us")
    rows = [
        [
            bytes_text(row["bytes"]),
            *(time_text(row[column]) for column in columns),
            f"{row['over_plain']:.2f}",
        ]
        for row in record["rows"]
    ]
    return table(["all-reduce", "mpi4py", "plain", "order", "order / plain"], rows)


def _scale(record: Record) -> str:
    rows = []
    for job in record["jobs"]:
        one = job["contenders"]["mpidist"]
        rows.append(
            [
                str(job["ranks"]),
                f"{one['start_s']:.2f} s",
                f"{one['resident_after_calls_mib']:.1f} MiB",
                f"{one['async_calls_per_s']:.0f}",
                f"{one['sync_calls_per_s']:.0f}",
            ]
        )
    return table(
        [
            "ranks",
            "`init_rpc`",
            "memory of RPC, a rank",
            "asynchronous calls/s, all ranks",
            "synchronous calls/s",
        ],
        rows,
    )


def _kernels(record: Record) -> str:
    copies = [one for one in record["copies"] if "mpidist" in one["contenders"]]
    largest = {}
    for one in copies:
        largest[one["operation"], one["tensors_of"], one["dtypes"]] = one
    rows = [
        [
            f"{operation}, {tensors_of}, {dtypes}, {bytes_text(one['size_bytes'])}",
            time_text(one["contenders"]["mpidist"]["device"]["median_us"]),
            f"{one['contenders']['mpidist']['over_copy']:.2f}",
        ]
        for (operation, tensors_of, dtypes), one in largest.items()
    ]
    names = list(dict.fromkeys(name for one in record["powersgd"] for name in one["contenders"]))
    pairs = _pairs(record, names)
    hooks = [
        [
            f"{one['tensors_of']}, rank {one['rank']}",
            *(
                time_text(one["contenders"][name]["issued"]["median_us"])
                if name in one["contenders"]
                else ""
                for name in names
            ),
            *(_issued_ratio(one["contenders"], *pair) for pair in pairs),
        ]
        for one in record["powersgd"]
    ]
    return (
        table(["kernel", "time on the device", "rate over a device copy's"], rows)
        + "\n\n"
        + table(
            [
                "PowerSGD of",
                *(_label(record, name) for name in names),
                *(" / ".join(_label(record, name) for name in pair) for pair in pairs),
            ],
            hooks,
        )
    )


def _issued_ratio(contenders: Mapping[str, Any], ours: str, peer: str) -> str:
    issued = {name: one["issued"] for name, one in contenders.items()}
    return _ratio(issued, ours, peer)


def _saving(record: Record) -> str:
    rows = [
        [f"consolidation, {name}", f"{sorted(times)[len(times) // 2]:.3g} ms"]
        for name, times in record["consolidation_ms"].items()
    ]
    return table(["state of the optimizer", "median"], rows)
