"""Outcomes of programs and tests on both sides, and the tables of them."""

from __future__ import annotations

import enum
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_NEEDS_GPU = re.compile(r"\bcuda\b|\bgpus?\b|\bnccl\b|accelerator", re.IGNORECASE)
_LAST_ERROR = re.compile(
    r"^(?:\[\w[\w ]*\]:?\s*)?((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)(?::.*)?)$"
)
_NOTE = 110  # characters


class Verdict(enum.Enum):
    """Outcome of one program or test on both sides."""

    PASSED = "passed"
    OURS_FAILS = "fails on mpidist"
    BOTH_FAIL = "fails with the peer, too"
    PEER_FAILS = "passes on mpidist alone"
    GPU = "needs a GPU"
    ABSENT = "not run"


@dataclass(frozen=True)
class Outcome:
    """Outcome on one side."""

    kind: str  # "passed", "failed" or "skipped"
    detail: str = ""


@dataclass(frozen=True)
class Row:
    """One program or test."""

    name: str
    verdict: Verdict
    lines: int | None = None  # changed for mpidist
    cpu_lines: int | None = None  # changed for a CPU, for both sides
    note: str = ""


def verdict(ours: Outcome, peer: Outcome) -> Verdict:
    """Return the verdict of a program or test that was run on both sides."""
    if "skipped" in (ours.kind, peer.kind):
        skipped = ours if ours.kind == "skipped" else peer
        return Verdict.GPU if _NEEDS_GPU.search(skipped.detail) else Verdict.ABSENT
    if ours.kind == "passed":
        return Verdict.PASSED if peer.kind == "passed" else Verdict.PEER_FAILS
    return Verdict.OURS_FAILS if peer.kind == "passed" else Verdict.BOTH_FAIL


def last_error(output: str) -> str:
    """Return the last line of an output that names an exception, or its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for line in reversed(lines):
        found = _LAST_ERROR.match(line)
        # Of a job that is ended because one rank has failed, the launcher's words say nothing.
        if found and "ChildFailedError" not in line:
            return found.group(1)
    return lines[-1] if lines else "it printed nothing"


def of_junit(text: str) -> dict[str, Outcome]:
    """Return the outcomes of pytest's tests from its JUnit file, by ``file::test``."""
    found: dict[str, Outcome] = {}
    for case in ElementTree.fromstring(text).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        outcome = Outcome("passed")
        for child in case:
            if child.tag in ("failure", "error"):
                message = child.get("message") or ""
                outcome = Outcome("failed", message or last_error(child.text or ""))
            elif child.tag == "skipped" and outcome.kind == "passed":
                outcome = Outcome("skipped", child.get("message") or "")
        found[name] = outcome
    return found


def of_unittest(text: str) -> tuple[int, int, list[str]]:
    """Return the numbers of tests run and skipped, and the names that failed, of unittest's output.

    Raises:
        ValueError: The output does not say how many tests have run.
    """
    ran = re.search(r"^Ran (\d+) tests? in", text, re.MULTILINE)
    if ran is None:
        raise ValueError("the suite did not reach its end")
    skipped = re.search(r"skipped=(\d+)", text)
    failed = re.findall(r"^(?:FAIL|ERROR): (\S+) \((\S+)\)", text, re.MULTILINE)
    return (
        int(ran.group(1)),
        int(skipped.group(1)) if skipped else 0,
        sorted(
            {f"{place}.{name}" if not place.endswith(name) else place for name, place in failed}
        ),
    )


def joined(ours: Mapping[str, Outcome], peer: Mapping[str, Outcome]) -> list[Row]:
    """Return a row for each test that was run on either side."""
    missing = Outcome("failed", "the run ended before it")
    return [
        Row(
            name,
            verdict(ours.get(name, missing), peer.get(name, missing)),
            note=short((ours.get(name, missing)).detail or peer.get(name, missing).detail),
        )
        for name in sorted({*ours, *peer})
    ]


def short(text: str) -> str:
    """Return the first line of a text, shortened, for a cell of a table."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    line = line.replace("|", "\\|").replace("<", "‹").replace(">", "›").replace("*", "\\*")
    line = re.sub(r"/(?:[\w.+-]+/)+", "…/", line)
    return line if len(line) <= _NOTE else f"{line[: _NOTE - 1]}…"


def counts(rows: Iterable[Row]) -> Counter[Verdict]:
    """Return the number of rows of each verdict."""
    return Counter(row.verdict for row in rows)


def summary(rows: Iterable[Row]) -> str:
    """Return the counts as one line."""
    found = counts(rows)
    return ", ".join(f"{each.value}: {found[each]}" for each in Verdict if found[each])


def table(rows: Iterable[Row], *, all_rows: bool) -> str:
    """Return a Markdown table.

    Args:
        all_rows: Show the rows that passed, too, with the lines that were changed.
    """
    if all_rows:
        head = [
            "| program | outcome | lines changed | for a CPU | |",
            "| --- | --- | --- | --- | --- |",
        ]
        return "\n".join(
            [
                *head,
                *(
                    f"| `{row.name}` | {row.verdict.value} | {_number(row.lines)} | "
                    f"{_number(row.cpu_lines)} | {row.note} |"
                    for row in rows
                ),
            ]
        )
    shown = [row for row in rows if row.verdict in (Verdict.OURS_FAILS, Verdict.PEER_FAILS)]
    if not shown:
        return ""
    head = ["| test | outcome | |", "| --- | --- | --- |"]
    lines = [f"| `{row.name}` | {row.verdict.value} | {row.note} |" for row in shown]
    return "\n".join([*head, *lines])


def _number(count: int | None) -> str:
    return "" if count is None else str(count)
