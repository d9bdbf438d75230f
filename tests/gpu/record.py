"""Record of the last run of each step of ``make gpu``: a JSON file that the next call reads.

``times.json`` beside this module has the same form: the last known runs, for a machine without a
record. An entry ``"estimated": true`` was not measured; an outcome ``""`` says that the step has
not run yet. After a session on a GPU its ``steps.json`` may take the place of ``times.json``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.gpu.plan import FAILED, OK, Past

KNOWN = Path(__file__).with_name("times.json")
ORDER = Path(__file__).with_name("order.txt")


def order() -> list[str]:
    """Return the patterns of the default order."""
    lines = ORDER.read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def read(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Return a record: device, name of the step, last run; empty without a file.

    Raises:
        ValueError: The file is no record.
    """
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path} is no record of make gpu, remove it: {error}") from error
    if not _is_record(held):
        raise ValueError(f"{path} is no record of make gpu, remove it")
    return held


def _is_record(held: object) -> bool:
    return isinstance(held, dict) and all(
        isinstance(steps, dict)
        and all(
            isinstance(entry, dict)
            and isinstance(entry.get("outcome"), str)
            and isinstance(entry.get("seconds"), (int, float))
            and isinstance(entry.get("call"), int)
            for entry in steps.values()
        )
        for steps in held.values()
    )


def past(*records: Mapping[str, Mapping[str, Mapping[str, Any]]], device: str) -> dict[str, Past]:
    """Return the last runs on a device; a later record replaces what an earlier one has."""
    entries: dict[str, Mapping[str, Any]] = {}
    for one in records:
        entries.update(one.get(device, {}))
    return {
        name: Past(entry["outcome"], float(entry["seconds"]), entry["call"])
        for name, entry in entries.items()
    }


def updated(last: Past, outcome: str, seconds: float, call: int) -> Past:
    """Return a step's last run after another one.

    A run that was ended before its end shows only that the step takes at least so long.
    """
    if outcome not in (OK, FAILED):
        seconds = max(seconds, last.seconds)
    return Past(outcome, round(seconds, 1), call)


def write(path: Path, device: str, runs: Mapping[str, Past]) -> None:
    """Replace a device's runs in a record; a reader sees the old file or the new one."""
    held = read(path)
    held[device] = {
        name: {"outcome": run.outcome, "seconds": run.seconds, "call": run.call}
        for name, run in sorted(runs.items())
    }
    lines = [
        f" {json.dumps(name)}: {{\n  "
        + ",\n  ".join(f"{json.dumps(step)}: {json.dumps(run)}" for step, run in steps.items())
        + "\n }"
        for name, steps in held.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    os.replace(part, path)
