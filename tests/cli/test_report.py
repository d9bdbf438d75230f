"""Printed report on a job: 80 columns, findings first, large jobs folded."""

import dataclasses
import io

import pytest

from mpidist.cli import report, tables
from mpidist.comm.recorder.recording import Kind
from mpidist.comm.watchdog.thread_stacks import Line, Stack
from mpidist.reports import findings, job_files
from mpidist.reports.job import ENDED, RUNS
from tests.reports.made import collective, entry, job

BEFORE = collective(1, 1, 2)


def printed(made, last=20):
    screen = tables.console(io.StringIO())
    report.print_report(made, findings.findings(made), last, screen)
    text = screen.file.getvalue()
    # The first line and the files' can be copied.
    assert max(map(len, text.splitlines()[1:-1])) <= 80, text
    return text


def test_the_finding_comes_before_states_operations_and_stacks():
    stacks = [
        Stack((Line("/usr/lib/python3/x.py", 3, "idle"),), 3, "mpidist-world"),
        Stack(
            (Line("train.py", 12, "load_data"), Line("train.py", 30, "<module>")), 1, "MainThread"
        ),
    ]
    made = job([BEFORE, collective(2, 3)], [BEFORE, collective(2, 4)], [BEFORE], stacks={2: stacks})
    lines = printed(made).splitlines()
    assert lines[0] == "mpidist report: job made, 3 ranks on here, runs: train.py"
    assert lines[1].startswith("found: rank 2 has not called all_reduce number 2")
    text = "\n".join(lines)
    order = ["do: look at", "rank  process", "last operations", "threads of"]
    assert sorted(order, key=text.index) == order
    assert "  MainThread: train.py:12 in load_data()" in lines
    assert ":21.000000  0-2   all_reduce number 1" in text
    assert "last operations" not in printed(made, last=0)


def test_a_good_job_has_nothing_that_keeps_it():
    text = printed(job([BEFORE], [BEFORE], states=(ENDED, ENDED)))
    assert "has ended here" in text and "nothing keeps it" in text


def test_a_large_job_is_folded():
    made = job(*([BEFORE, collective(2, 3)] if rank != 17 else [BEFORE] for rank in range(64)))
    text = printed(made)
    assert len(text.splitlines()) < 30, text
    assert "0-16, 18-63" in text and "rank 17: in none" in text


@pytest.mark.parametrize("state", [RUNS, ENDED])
def test_ranks_of_other_nodes_are_named(state):
    entries, left_out = [BEFORE, entry(2, Kind.STEP, "Adam", 3)], ["recorder-1 is cut"]
    text = printed(job(entries, size=4, states=(state,), left_out=left_out))
    title, second, *_ = text.splitlines()
    assert "without files of ranks 1-3 (on other nodes: --folder)" in title
    assert second == "left out: recorder-1 is cut"


def test_the_command_reads_a_folder_and_lists_other_jobs(call, tmp_path, monkeypatch):
    made = job([BEFORE, collective(2, 3)], [BEFORE])
    others = [job_files.Found(name, tmp_path / name, made.first) for name in ("new", "old")]
    asked = []
    monkeypatch.setattr(job_files, "jobs", lambda: others)
    monkeypatch.setattr(
        job_files, "read", lambda folder, *, asks: asked.append((folder, asks)) or [made]
    )
    done = call("report")
    assert done.exit_code == 1 and "other jobs of this node: mpidist report JOB" in done.output
    done = call("report", "old", "--no-stacks", "--last", "0")
    assert done.exit_code == 1 and asked == [(tmp_path / "new", True), (tmp_path / "old", False)]
    done = call("report", "--folder", str(tmp_path), "--torch", str(tmp_path / "dumps"))
    assert "found: rank 1 has not called" in done.output
    assert "2 files of the flight recorder: torchfrtrace -p rank_" in done.output
    assert sorted(path.name for path in (tmp_path / "dumps").iterdir()) == ["rank_0", "rank_1"]
    done = call("report", "none")
    assert done.exit_code == 2 and "jobs of this node: new, old" in done.stderr


def test_each_program_of_a_job_has_its_report_and_its_dumps(call, tmp_path, monkeypatch):
    waits, goes_on = job([BEFORE, collective(2, 3)], [BEFORE]), job([BEFORE], [BEFORE])
    for rank, each in goes_on.recordings.items():
        path = each.path.with_name(f"recorder-{rank + 2}")
        goes_on.recordings[rank] = dataclasses.replace(each, path=path, worlds=("b",))
    monkeypatch.setattr(job_files, "read", lambda folder, *, asks: [goes_on, waits])
    done = call("report", "--folder", str(tmp_path), "--torch", str(tmp_path / "dumps"))
    assert done.exit_code == 1
    _, first, second = done.output.split("mpidist report: job made, ")
    assert first.startswith("2 ranks (ranks 2, 3 of all) on here") and "nothing keeps it" in first
    assert second.startswith("2 ranks on here") and "found: rank 1 has not called" in second
    for number in range(2):
        place = tmp_path / "dumps" / f"world_{number}"
        assert f"2 files of the flight recorder: torchfrtrace -p rank_ {place}" in done.output
        assert sorted(path.name for path in place.iterdir()) == ["rank_0", "rank_1"]
