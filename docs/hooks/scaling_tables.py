"""Records of the scaling benchmark as Markdown: steps, errors of the model, predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import result_tables

Record = Mapping[str, Any]
_RANKS = (2, 8, 64, 512, 4096)
_STARTUP = ("own_start_s", "gloo_start_s", "rss_mib", "files", "threads", "group_messages")


def is_scaling(record: Record) -> bool:
    """Return whether a record is a report over jobs of several sizes."""
    return "validation" in record and "predictions" in record


def tables(record: Record) -> str:
    """Return the tables of a report with their titles; tables without rows are left out."""
    largest = max(job["ranks"] for job in record["jobs"])
    parts = [
        (
            "Measured steps",
            "\\* more ranks than cores: their efficiency counts the cores.",
            _steps(record["steps"]),
        ),
        ("How good the model is", _verdict(record["validation"]), _errors(record["validation"])),
        ("Which hook the model chooses", "", _choices(record["hook_choices"])),
        (
            "Predicted",
            f"One rank a node. Beyond {largest} ranks nothing was measured.",
            _predictions(record["predictions"]),
        ),
        (
            "Which hook pays",
            "Predicted, 64 ranks, one a node: the fastest hook at each bandwidth.",
            _pays(record["hooks_that_pay"]),
        ),
    ]
    return "\n\n".join(
        "\n\n".join(one for one in (f"#### {title}", text, rows) if one)
        for title, text, rows in parts
        if rows
    )


def is_startup(record: Record) -> bool:
    """Return whether a record has the costs of ranks before their first step."""
    return "growth" in record


def startup(record: Record) -> str:
    """Return the maximum costs of a rank by number of ranks, and their growth."""
    rows = [
        [
            _ranks(job),
            f"{job['own_start_s']:.2f} s",
            f"{job['gloo_start_s']:.2f} s",
            f"{job['rss_mib']:.1f} MiB",
            f"{job['files']}",
            f"{job['threads']}",
            f"{job['group_messages']:.0f}",
        ]
        for job in record["jobs"]
    ]
    headers = [
        "ranks",
        "start of the group",
        "Gloo's",
        "memory",
        "open files",
        "threads",
        "messages of the group",
    ]
    growth = [record["growth"].get(name, "") for name in _STARTUP]
    return _table(headers, [*rows, ["growth", *growth]])


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return result_tables.table(headers, rows) if rows else ""


def _where(one: Record) -> str:
    return (
        f"{result_tables.link_text(one['link']) if one['link'] else 'one node'}, {one['network']}"
    )


def _ranks(one: Record) -> str:
    mark = " \\*" if one["oversubscribed"] else ""
    return f"{one['ranks']}{mark}"


def _steps(steps: Sequence[Record]) -> str:
    rows = [
        [
            f"{_where(one)}, {one['scaling']}, {one['hook']}",
            _ranks(one),
            result_tables.time_text(1e6 * one["seconds"]),
            result_tables.time_text(1e6 * max(one["exposed_seconds"], 0.0)),
            "" if one["efficiency"] is None else f"{one['efficiency']:.2f}",
            result_tables.time_text(1e6 * one["predicted_seconds"])
            if "predicted_seconds" in one
            else "",
        ]
        for one in steps
    ]
    shown = _table(["step", "ranks", "measured", "exposed", "efficiency", "model"], rows)
    # Hundreds of rows, for a search within the page.
    return (
        shown
        and f"<details markdown>\n<summary>{len(rows)} steps</summary>\n\n{shown}\n\n</details>"
    )


def _verdict(found: Record) -> str:
    if found["median_error"] is None:
        return "No points were held out."
    return (
        f"Median error on {found['points']} measured points that it was not fitted to: "
        f"**{found['median_error']:.0%}**."
    )


def _errors(found: Record) -> str:
    rows = [
        (name, value)
        for group in ("by_operation", "by_ranks", "by_rate")
        for name, value in found[group].items()
    ]
    parts = {
        "of ranks with a core each": "without_oversubscribed",
        "at 2 and 4 ranks, between fitted sizes": "at_fitted_ranks",
        "at other numbers of ranks": "at_other_ranks",
        "each job's own pace of computing not given": "without_the_jobs_pace",
    }
    rows = [(name, found.get(key)) for name, key in parts.items()] + rows
    rows += [("exposed time of held-out steps", found.get("exposed"))]
    rows += [
        (f"exposed, {name}", value) for name, value in found.get("exposed_by_link", {}).items()
    ]
    rows += [("held-out steps", found["steps"])]
    rows += [(f"steps, {name}", value) for name, value in found["steps_by_link"].items()]
    return _table(
        ["points", "median error"],
        [[name, f"{value:.0%}"] for name, value in rows if value is not None],
    )


def _choices(found: Sequence[Record]) -> str:
    rows = [
        [_where(one), _ranks(one), one["fastest"], one["chosen"], f"{one['lost']:.0%}"]
        for one in found
    ]
    return _table(["link, network", "ranks", "fastest measured", "chosen", "step longer by"], rows)


def _predictions(found: Sequence[Record]) -> str:
    times = {(_where(one), one["hook"], one["ranks"]): one for one in found}
    rows = []
    for where, hook in dict.fromkeys((where, hook) for where, hook, _ in times):
        cells = [times.get((where, hook, ranks)) for ranks in _RANKS]
        shown = [
            ""
            if one is None
            else f"{result_tables.time_text(1e6 * one['predicted_seconds'])} "
            f"({one['efficiency']:.2f})"
            for one in cells
        ]
        rows.append([f"{where}, {hook}", *shown])
    return _table(["step (efficiency)", *(f"{ranks} ranks" for ranks in _RANKS)], rows)


def _pays(found: Sequence[Record]) -> str:
    chosen = [one for one in found if one["ranks"] == 64]
    if not chosen:
        return ""
    rates = list(chosen[0]["fastest"])
    rows = []
    for one in chosen:
        cells = []
        for rate, hook in one["fastest"].items():
            times = one["predicted_seconds"][rate]
            cells.append(hook if hook == "none" else f"{hook} ×{times['none'] / times[hook]:.1f}")
        rows.append([f"{one['processor']}, {one['network']}", *cells])
    return _table(["processor, network", *(f"{rate} Gbit/s" for rate in rates)], rows)
