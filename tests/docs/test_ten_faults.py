"""Faults of docs/ten-faults.md: each program prints the lines that the page has."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest

from mpidist.comm.mpi import job_folder, rank_ranges
from mpidist.comm.mpi.launcher_env import without_launcher
from tests.tools.support import ROOT, VARIABLES, launcher

_LIMIT_S = 120
_PAGE = ROOT / "docs" / "ten-faults.md"
_FAULT = re.compile(
    r"^<!-- fault: (?P<ranks>\d) ?(?P<variables>[^>]*?) -->\n```python\n(?P<code>.*?)^```$"
    r".*?^```text\n(?P<says>.*?)^```$",
    re.M | re.S,
)
_OTHERS = re.compile(r"(?<= where )ranks? [\d, ]+(?= called)")
_RANKS = re.compile(r"\b(?:ranks? |worker)\d+(?:, \d+|-\d+)*")
_LETTERS = str.maketrans("0123456789", "abcdefghij")
_REPORT = re.compile(r"^<!-- report -->\n```text\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Fault:
    """Program with a fault.

    Attributes:
        title: Of its section.
        ranks: Number of ranks.
        variables: Of the job.
        code: Text of the program.
        says: Lines that the job prints.
        report: Lines of ``mpidist report``.
    """

    title: str
    ranks: int
    variables: dict[str, str]
    code: str
    says: str
    report: str


def faults() -> list[Fault]:
    found = []
    for section in re.split(r"^## ", _PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]:
        if match := _FAULT.search(section):
            variables = dict(each.split("=") for each in match["variables"].split())
            report = _REPORT.search(section)
            found.append(
                Fault(
                    section.splitlines()[0],
                    int(match["ranks"]),
                    variables,
                    match["code"],
                    match["says"],
                    report[1] if report else "",
                )
            )
    return found


def on(ranks: int, fault: Fault) -> Fault:
    """Return the fault with the lines that it prints on so many ranks, of which rank 1 differs."""
    others = rank_ranges.named([rank for rank in range(ranks) if rank != 1])
    said, report = (_OTHERS.sub(others, text) for text in (fault.says, fault.report))
    return replace(fault, ranks=ranks, says=said, report=report)


def plain(text: str) -> str:
    """Return a text without what differs between runs: numbers, host, folders, line breaks.

    Numbers of ranks stay, as letters.
    """
    text = " ".join(text.replace(f" {socket.gethostname()}", " node1").split())
    text = re.sub(r'File "[^"]*/', 'File "', text)
    text = _RANKS.sub(lambda found: found[0].translate(_LETTERS), text)
    return re.sub(r"\d+(\.\d+)?", "#", text)


def missing(said: str, wanted: str) -> list[str]:
    return [
        line for line in wanted.splitlines() if line != "..." and plain(line) not in plain(said)
    ]


def test_the_page_has_ten_faults():
    page = _PAGE.read_text(encoding="utf-8")
    assert page.count("\n## ") == 10 and len(faults()) == page.count("<!-- fault: ") == 7


def test_lines_are_compared_without_what_differs_between_runs():
    said = (
        f'[rank 0]   File "/a/b/train.py", line 7\nprocess 12 on {socket.gethostname()}, for 1.5 s'
    )
    assert missing(said, 'File "train.py", line 9\n...\nprocess 3 on node1, for 20 s') == []
    assert missing(said, "process 3 on far") == ["process 3 on far"]
    assert missing(said, "[rank 1]   File") == ["[rank 1]   File"]
    assert missing("ranks\n0, 2 are in", "ranks 0, 2 are") == []
    assert missing("ranks 0, 2 are in", "ranks 0, 3 are") != []
    assert missing("worker1 -> worker0", "worker0 -> worker1") != []


def test_lines_are_those_of_the_number_of_ranks():
    fault = Fault("it", 2, {}, "", "rank 1 called broadcast where rank 0 called all_reduce", "")
    for ranks, others in ((2, "rank 0"), (3, "ranks 0, 2"), (4, "ranks 0, 2, 3")):
        made = on(ranks, fault)
        assert made.says == f"rank 1 called broadcast where {others} called all_reduce"
        assert on(2, made) == fault


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.title)
def test_a_fault_is_reported_as_the_page_has_it(fault, ranks, tmp_path):
    fault = on(ranks, fault)
    name = str(os.getpid())
    (tmp_path / "train.py").write_text(fault.code)
    variables = {**without_launcher(os.environ), **VARIABLES, "MPIDIST_JOB": name, "COLUMNS": "80"}

    def output_of(*command):
        done = subprocess.run(
            command,
            env={**variables, **fault.variables},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        return done.stdout

    try:
        said = output_of(*launcher(fault.ranks), sys.executable, "train.py")
        assert missing(said, fault.says) == [], said
        if fault.report:
            said = output_of(sys.executable, "-m", "mpidist", "report", name)
            assert missing(said, fault.report) == [], said
    finally:
        shutil.rmtree(job_folder.path_of(name), ignore_errors=True)
