"""Runs of programs on both sides, each in a copy of its folder."""

from __future__ import annotations

import importlib.util
import re
import shutil
import tempfile
from pathlib import Path

from tests.peers import jobs, small_data
from tests.peers.outcomes import Outcome, Row, Verdict, last_error, short, verdict
from tests.peers.programs import (
    EditError,
    Program,
    changed_lines,
    edited,
    starts_of_processes,
)


def absent(program: Program, sources: Path) -> str:
    """Return what keeps a program from being run here; empty if nothing does."""
    missing = [name for name in program.needs if importlib.util.find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    kind, _, name = program.path.rpartition(":")
    if kind == "module":
        return "" if importlib.util.find_spec(name) is not None else f"there is no {name}"
    return "" if (sources / program.path).is_file() else "its source is not among SOURCES"


def copied(program: Program, sources: Path, side: str, place: Path) -> Path:
    """Copy a program's folder, apply its edits, and write its data; return the copy."""
    folder = place / "work" / "program"
    if program.path.startswith("module:"):
        folder.mkdir(parents=True)
        return folder
    shutil.copytree((sources / program.path).parent, folder)
    for name in {edit.file for edit in program.edits}:
        file = folder / name
        edits = [each for each in program.edits if each.file == name]
        file.write_text(
            edited(file.read_text(), [e for e in edits if e.for_cpu or side == jobs.OURS])
        )
    if program.data:
        small_data.WRITERS[program.data](folder)
    return folder


def lines_changed(program: Program, sources: Path) -> tuple[int, int]:
    """Return the lines that a user changes for mpidist, and those changed here for a CPU."""
    if program.path.startswith("module:"):
        return 0, 0
    source = sources / program.path
    numbers = [0, 0]
    for name in {edit.file for edit in program.edits}:
        text = (source.parent / name).read_text()
        edits = [edit for edit in program.edits if edit.file == name]
        for_cpu = edited(text, [edit for edit in edits if edit.for_cpu])
        numbers[0] += changed_lines(for_cpu, edited(for_cpu, [e for e in edits if not e.for_cpu]))
        numbers[1] += changed_lines(text, for_cpu)
    if program.start != "torchrun":
        numbers[0] += starts_of_processes(source.read_text())
    return numbers[0], numbers[1]


def judged(program: Program, side: str, end: jobs.Ended, record: list[str]) -> Outcome:
    """Return the outcome of a job from its end and the groups that it has made."""
    if program.until:
        worked = end.has_said
    else:
        worked = end.status == 0
        if worked and program.says and not re.search(program.says, end.output, re.MULTILINE):
            return Outcome("failed", f"it ended without saying {program.says!r}")
    if not worked:
        limit = f"not ended after {program.limit_s:g} s"
        return Outcome("failed", limit if end.status is None else last_error(end.output))
    theirs = [line for line in record if ("mpidist" in line) != (side == jobs.OURS)]
    if theirs or (side == jobs.OURS and not record):
        return Outcome("failed", f"it made no group of {side}: {', '.join(sorted(set(theirs)))}")
    return Outcome("passed")


def run_side(program: Program, sources: Path, side: str) -> tuple[Outcome, str]:
    """Run a program on one side; return its outcome and its output."""
    with tempfile.TemporaryDirectory(prefix="peers-") as text:
        place = Path(text)
        record = place / "record"
        folder = copied(program, sources, side, place)
        end = jobs.run(
            jobs.commands(program, side),
            folder,
            jobs.environment(side, record, program),
            program.limit_s,
            program.until,
        )
        lines = record.read_text().splitlines() if record.exists() else []
    return judged(program, side, end, lines), end.output


def run(program: Program, sources: Path, logs: Path) -> Row:
    """Run a program on both sides, and keep what it printed."""
    if reason := absent(program, sources):
        return Row(program.name, Verdict.ABSENT, note=reason)
    outcomes: dict[str, Outcome] = {}
    try:
        lines, cpu_lines = lines_changed(program, sources)
        for side in (jobs.OURS, jobs.PEER):
            outcomes[side], output = run_side(program, sources, side)
            name = re.sub(r"[^\w.=-]+", "_", program.name)
            (logs / f"{name}.{side}.txt").write_text(output)
    except EditError as error:
        return Row(program.name, Verdict.ABSENT, note=short(f"another version: {error}"))
    ours, peer = outcomes[jobs.OURS], outcomes[jobs.PEER]
    kind = verdict(ours, peer)
    note = program.cause if ours.kind == "failed" else ""
    note = note or short(ours.detail or peer.detail)
    return Row(program.name, kind, lines, cpu_lines, note)
