"""Plots of records, in a light and a dark picture, beside the JSON."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from harness import pictures

# A second picture of some operations of a record, for a reader's first look: README shows it.
EXCERPTS = {
    "collectives-openmpi-2": (
        "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single",
    ),
}  # fmt: skip
# Modules whose ``draw`` plots the records of a benchmark; the other records are tables alone.
_MODULES = {
    "allocate": "harness.calls",
    "autograd": "harness.calls",
    "collectives": "harness.report",
    "ddp": "training.report",
    "device": "harness.report",
    "growth": "collectives.growth",
    "kernels": "cuda_kernels.report",
    "messages": "harness.calls",
    "oss": "harness.report",
    "owners": "training.report",
    "powersgd": "training.report",
    "replay": "replay.figure",
    "rpc": "harness.calls",
    "rpc-scale": "rpc.scale_figure",
    "scaling": "scaling.plot",
}


def beside(path: Path) -> str:
    """Plot the record in ``path``; return the names of what was written.

    Without matplotlib, as on a borrowed machine without a network, there is no plot.
    """
    written = f"written to {path.parent.name}: {path.name}"
    if importlib.util.find_spec("matplotlib") is None:
        return f"{written}; matplotlib is not installed: benchmarks/plots.py plots it elsewhere"
    source = path.read_bytes()
    record = json.loads(source)
    drawing = drawing_of(record)
    found = pictures.write(drawing, record, path.with_suffix(".png"), source)
    chosen = EXCERPTS.get(path.stem, ())
    some = [one for one in record["results"] if one["operation"] in chosen] if chosen else []
    # A run of other operations has the same name.
    if some:
        target = path.with_name(f"{path.stem}-excerpt.png")
        found += pictures.write(drawing, record | {"results": some}, target, source)
    return f"{written}, {', '.join(one.name for one in found)}"


def written(path: Path) -> str:
    """Plot the record in ``path`` if its kind has a plot; return the names of what was written."""
    record = json.loads(path.read_bytes())
    return beside(path) if has_plot(record) else f"written to {path.parent.name}: {path.name}"


def has_plot(record: dict[str, Any]) -> bool:
    """Return whether a record is drawn; of jobs' own records and those over jobs, only these."""
    over_jobs = {"scaling": "model", "rpc-scale": "jobs"}.get(record.get("benchmark", ""))
    return record.get("benchmark") in _MODULES and (over_jobs is None or over_jobs in record)


def drawing_of(record: dict[str, Any]) -> pictures.Drawing:
    """Return the function that plots a record of this kind.

    Raises:
        ValueError: Records of this benchmark have no plot.
    """
    name = record.get("benchmark")
    if name in _MODULES:
        return importlib.import_module(_MODULES[name]).draw
    raise ValueError(f"records of the benchmark {name!r} have no plot of their own")


def plotted(folder: Path) -> list[Path]:
    """Return the records of a folder that have a plot."""
    return [
        path for path in sorted(folder.glob("*.json")) if has_plot(json.loads(path.read_bytes()))
    ]
