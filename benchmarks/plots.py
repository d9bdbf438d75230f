"""Plots of records: beside the JSON, or later from it where matplotlib was not installed.

Command: ``python benchmarks/plots.py RECORD.json …``
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def beside(record: dict[str, Any], path: Path, draw: Callable[[dict[str, Any], Path], None]) -> str:
    """Plot a record that was written to ``path``; return the names of what was written.

    Without matplotlib, as on a borrowed machine without a network, there is no plot.
    """
    written = f"written to {path.parent.name}: {path.name}"
    if importlib.util.find_spec("matplotlib") is None:
        return f"{written}; matplotlib is not installed: benchmarks/plots.py plots it elsewhere"
    draw(record, path.with_suffix(".png"))
    return f"{written} and {path.with_suffix('.png').name}"


def _drawing(record: dict[str, Any]) -> Callable[[dict[str, Any], Path], None]:
    """Return the function that plots a record of this kind.

    Raises:
        ValueError: Records of this benchmark have no plot.
    """
    import growth
    import kernel_report
    import report
    import training_report

    name = record.get("benchmark")
    if name == "growth":
        return growth.draw
    if name == "kernels":
        return kernel_report.draw
    if name in ("collectives", "device"):
        return report.draw
    if name in ("ddp", "powersgd"):
        return training_report.draw
    raise ValueError(f"records of the benchmark {name!r} have no plot of their own")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", type=Path, nargs="+", metavar="RECORD.json")
    for path in parser.parse_args(words).records:
        record = json.loads(path.read_text(encoding="utf-8"))
        print(beside(record, path, _drawing(record)))


if __name__ == "__main__":
    main()
