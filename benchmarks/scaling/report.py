"""Report on jobs of several sizes: tables, JSON and plot; predictions apart from measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import environment, plots, report, tables
from harness.goals import format_bytes
from scaling import advice as scaling_advice
from scaling import answer as scaling_answer
from scaling import model as models
from scaling.cost_model import TRAINED_RANKS, median_error, rate_of

# Titles, rows, and the number of leading columns that name a row.
Table = tuple[Sequence[str], list[list[Any]], int]
# Medians of a part of the held-out points, in ``validation``.
PARTS = {
    "without_oversubscribed": "… of ranks with a core each",
    "at_fitted_ranks": "… at 2 and 4 ranks, between fitted sizes",
    "at_other_ranks": "… at other numbers of ranks",
    "without_the_jobs_pace": "… each job's own pace of computing not given",
}
# Marks numbers of ranks larger than the number of cores.
MARK = "*"
_SHOWN_SIZES = 6
SHOWN_RANKS = (2, 8, 64, 512, 4096)


def write(records: Sequence[dict[str, Any]], missed: Mapping[str, str], output: Path) -> str:
    """Write ``scaling-<MPI library>.json`` and ``.png``; return the tables."""
    # Jobs within a node first, then by falling rate of the link.
    jobs = sorted(records, key=lambda one: (-rate_of(one["link"]), one["link"], one["ranks"]))
    model, errors = models.fitted(jobs)
    measured = models.measured_steps(model, jobs)
    predicted = models.predictions(model, jobs)
    pays = scaling_advice.table_of(model)
    record = {
        "benchmark": "scaling",
        "jobs": jobs,
        "jobs_without_result": dict(missed),
        "model": models.to_json(model),
        "validation": validation(errors, measured),
        "held_out": errors,
        "steps": measured,
        "hook_choices": models.choices(measured),
        "predictions": predicted,
        "hooks_that_pay": pays,
    }
    path = output / f"scaling-{environment.library_name(jobs[0]['environment'])}.json"
    report.write_json(finite(record), path)
    return "\n\n".join([text_of(record), scaling_answer.text_of(pays), plots.beside(path)])


def finite(data: Any) -> Any:
    """Return plain data with None for infinite numbers, which JSON lacks."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and math.isinf(data) else data


def validation(
    errors: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the median errors on held-out points, of collectives and of steps."""
    steps = [one for one in measured if "relative_error" in one and not one["fitted"]]
    # A step that was fast by chance has no exposed time to compare with.
    exposed = [
        {**one, "relative_error": one["predicted_exposed_seconds"] / one["exposed_seconds"] - 1}
        for one in steps
        if one["exposed_seconds"] > 0
    ]
    blind = [
        {"relative_error": one["predicted_seconds"] / one["pace"] / one["seconds"] - 1}
        for one in errors
    ]
    at_fitted = [one for one in errors if one["ranks"] in TRAINED_RANKS]
    middle = median_error(errors)
    return {
        "what": "median of |predicted / measured - 1| on points that nothing was fitted to",
        "target": models.TARGET,
        "points": len(errors),
        "median_error": middle,
        "verdict": "not measured"
        if middle is None
        else "reached"
        if middle <= models.TARGET
        else "not reached",
        "by_operation": _medians(errors, lambda one: (one["class"], one["operation"])),
        "by_ranks": _medians(errors, lambda one: (one["class"], f"{one['ranks']} ranks")),
        "by_rate": _medians(errors, lambda one: (f"{one['rate_gbit_s']:g} Gbit/s",)),
        "without_oversubscribed": median_error([one for one in errors if one["share"] == 1]),
        "at_fitted_ranks": median_error(at_fitted),
        "at_other_ranks": median_error([one for one in errors if one not in at_fitted]),
        "without_the_jobs_pace": median_error(blind),
        "steps_judged": len(steps),
        "exposed": median_error(exposed),
        "exposed_by_link": _medians(exposed, lambda one: (one["link"] or models.NODE,)),
        "steps": median_error(steps),
        "steps_without_oversubscribed": median_error(
            [one for one in steps if not one["oversubscribed"]]
        ),
        "steps_by_link": _medians(steps, lambda one: (one["link"] or models.NODE,)),
    }


def _medians(entries: Sequence[Mapping[str, Any]], key: Any) -> dict[str, float]:
    names = list(dict.fromkeys(", ".join(key(one)) for one in entries))
    found = {
        name: median_error([one for one in entries if ", ".join(key(one)) == name])
        for name in names
    }
    return {name: error for name, error in found.items() if error is not None}


def text_of(record: Mapping[str, Any]) -> str:
    """Return the report's tables with their titles."""
    titles = {
        "Steps, measured. *: more ranks than cores; their efficiency counts the cores": _steps(
            record["steps"]
        ),
        "Collectives, measured, us a call: bytes of the whole by job": _collectives(record["jobs"]),
        "Memory of the rank that has most, MiB": _memory(record["jobs"]),
        "Model: median error on measured points that it was not fitted to": _validation(
            record["validation"]
        ),
        "The hook that the model chooses, and the fastest measured": _choices(
            record["hook_choices"]
        ),
        f"PREDICTED, one rank a node, a core each; beyond {_most(record)} ranks nothing was "
        "measured": _predicted(record),
    }
    return "\n\n".join(
        f"{title}\n{tables.text(rows, headers, keys=keys)}"
        for title, (headers, rows, keys) in titles.items()
        if rows
    )


def _steps(steps: Sequence[Mapping[str, Any]]) -> Table:
    headers = (
        "link",
        "ranks",
        "network",
        "scaling,\nbatch",
        "hook",
        "step\nms",
        "exposed\nms",
        "effi-\nciency",
        "model\nms",
    )
    rows = [
        [
            one["link"] or "node",
            _ranks(one),
            one["network"],
            f"{one['scaling']}, {one['batch']}",
            one["hook"],
            f"{1e3 * one['seconds']:.1f}",
            f"{1e3 * one['exposed_seconds']:.1f}",
            "" if one["efficiency"] is None else f"{one['efficiency']:.2f}",
            f"{1e3 * one['predicted_seconds']:.1f}" if "predicted_seconds" in one else "",
        ]
        for one in steps
    ]
    return headers, rows, 5


def _collectives(jobs: Sequence[Mapping[str, Any]]) -> Table:
    wanted = [job for job in jobs if job["ranks"] > 1]
    times = [
        {(one["operation"], one["nbytes"]): one["us"] for one in job["collectives"]}
        for job in wanted
    ]
    rows = []
    for operation in dict.fromkeys(operation for own in times for operation, _ in own):
        sizes = sorted({nbytes for own in times for name, nbytes in own if name == operation})
        for nbytes in sizes[:: max(len(sizes) // _SHOWN_SIZES, 1)]:
            found = [own.get((operation, nbytes)) for own in times]
            cells = [
                "" if us is None else f"{us:.0f}" if us >= 100 else f"{us:.1f}" for us in found
            ]
            rows.append([operation, format_bytes(nbytes) if nbytes else "", *cells])
    return ("", "bytes", *(f"{job['link'] or 'node'}\n{_ranks(job)}" for job in wanted)), rows, 2


def _memory(jobs: Sequence[Mapping[str, Any]]) -> Table:
    headers = ("link", "ranks", "RSS", "PSS", "of the model\nin DDP, RSS", "device")
    rows = [
        [
            job["link"] or "node",
            _ranks(job),
            f"{job['memory']['rss_mib']:.0f}",
            f"{job['memory']['pss_mib']:.0f}",
            f"{job['memory']['rss_mib'] - job['memory']['rss_before_mib']:.0f}",
            f"{job['memory']['device_mib']:.0f}" if job["memory"]["device_mib"] else "",
        ]
        for job in jobs
        if job["memory"]
    ]
    return headers, rows, 2


def _validation(found: Mapping[str, Any]) -> Table:
    rows = [
        [
            f"all {found['points']} held-out points: {found['verdict']}, to reach "
            f"{found['target']:.0%}",
            found["median_error"],
        ]
    ]
    rows += [[title, found[key]] for key, title in PARTS.items()]
    for group in ("by_operation", "by_ranks", "by_rate"):
        rows += [[name, value] for name, value in found[group].items()]
    rows += [[f"exposed time of {found['steps_judged']} held-out steps", found["exposed"]]]
    rows += [[f"exposed, {name}", value] for name, value in found["exposed_by_link"].items()]
    rows += [["held-out steps", found["steps"]]]
    rows += [["… of ranks with a core each", found["steps_without_oversubscribed"]]]
    rows += [[f"steps, {name}", value] for name, value in found["steps_by_link"].items()]
    shown = [[name, f"{value:.0%}"] for name, value in rows if value is not None]
    return ("", "median error"), shown, 1


def _choices(found: Sequence[Mapping[str, Any]]) -> Table:
    headers = ("link", "ranks", "network", "fastest", "chosen", "agree", "step longer by")
    rows = [
        [
            one["link"] or "node",
            _ranks(one),
            one["network"],
            one["fastest"],
            one["chosen"],
            "yes" if one["fastest"] == one["chosen"] else "NO",
            f"{one['lost']:.0%}",
        ]
        for one in found
    ]
    return headers, rows, 3


def _predicted(record: Mapping[str, Any]) -> Table:
    shown = [one for one in record["predictions"] if one["ranks"] in SHOWN_RANKS]
    keys = list(dict.fromkeys((one["link"], one["network"], one["hook"]) for one in shown))
    times = {(one["link"], one["network"], one["hook"], one["ranks"]): one for one in shown}
    headers = (
        "link",
        "network",
        "hook",
        *(f"{ranks} ranks\nms (efficiency)" for ranks in SHOWN_RANKS),
    )
    rows = []
    for key in keys:
        cells = [times[(*key, ranks)] for ranks in SHOWN_RANKS]
        rows.append(
            [
                *key,
                *(
                    f"{1e3 * one['predicted_seconds']:.1f} ({one['efficiency']:.2f})"
                    for one in cells
                ),
            ]
        )
    return headers, rows, 3


def _most(record: Mapping[str, Any]) -> int:
    return max(job["ranks"] for job in record["jobs"])


def _ranks(one: Mapping[str, Any]) -> str:
    return f"{one['ranks']}{MARK if one['oversubscribed'] else ''}"
