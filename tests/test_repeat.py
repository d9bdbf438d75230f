"""Repeated runs: what a call leaves is what the next one does, and failures are counted."""

from __future__ import annotations

import signal
import sys

import pytest

from tests import repeat
from tests.repeat import Case
from tests.tools import late_rank

CASES = [Case("mpi-2", "a.py", 4), Case("mpi-3", "", 2)]


class Ended(BaseException):
    """A call that is ended from outside."""


def test_a_later_call_goes_on_where_the_earlier_was_ended(tmp_path):
    path, ran, limit = tmp_path / "new" / "outcomes.jsonl", [], [3]

    def execute(case, turn, runs):
        if len(ran) == limit[0]:
            raise Ended
        ran.append((case.name, turn, runs))
        return 0, ""

    with pytest.raises(Ended):
        repeat.run(CASES, path, execute, at_once=1)
    assert ran == [("mpi-2 a.py", 0, 1), ("mpi-3", 0, 1), ("mpi-2 a.py", 1, 1)]
    # Ended within a line.
    path.write_text(path.read_text() + '{"name": "mpi-3", "st')
    limit[0] = 100
    repeat.run(CASES, path, execute)
    assert ran[3:] == [("mpi-2 a.py", 2, 2), ("mpi-3", 1, 1)]
    assert len(repeat.outcomes(path)) == 5
    repeat.run(CASES, path, execute)
    assert len(ran) == 5
    # More runs than before.
    repeat.run([Case("mpi-3", "", 3)], path, execute)
    assert ran[5:] == [("mpi-3", 2, 1)]


def test_outcomes_of_before_count_as_one_run_each(tmp_path):
    path, ran = tmp_path / "outcomes", []
    for turn in range(3):
        repeat.append(path, {"name": "mpi-2 a.py", "turn": turn, "status": 0, "seconds": 1.0})
    repeat.run(CASES[:1], path, lambda *what: ran.append(what) or (0, ""))
    assert ran == [(CASES[0], 3, 1)]


def test_no_run_begins_after_the_time(tmp_path):
    repeat.run(CASES, tmp_path / "outcomes", lambda *what: pytest.fail("begun"), until=0.0)


def test_failures_are_counted_and_their_output_is_kept(tmp_path):
    path = tmp_path / "outcomes"

    def execute(case, turn, runs):
        return (2, "why") if (case.tests, turn) == ("a.py", 1) else (0, "dots")

    repeat.run(CASES, path, execute, commit="1a2b3c4d", failures=tmp_path / "failures", at_once=1)
    found = repeat.outcomes(path)
    assert [one["status"] for one in found] == [0, 0, 2, 0, 0, 0]
    (kept,) = (tmp_path / "failures").iterdir()
    assert kept.name == "mpi-2-1-0.txt" and kept.read_text() == "why"
    assert {one["commit"] for one in found} == {"1a2b3c4d"}
    text, failures = repeat.table(CASES, repeat.outcomes(path))
    rows = [line.split()[:3] for line in text.splitlines()[1:]]
    assert failures == 1 and rows == [["4", "1", "4"], ["2", "0", "2"]]


@pytest.mark.parametrize("status", [0, 3])
def test_the_command_gets_stage_tests_and_turn_and_its_failure_is_the_scripts(
    tmp_path, capsys, monkeypatch, status
):
    program = tmp_path / "make.py"
    program.write_text(
        "import os, sys\n"
        f"open({str(tmp_path / 'calls')!r}, 'a').write(f'{{sys.argv[1:]}} '\n"
        "    f'{os.environ[\"MPIDIST_TESTS_LATE\"]}\\n')\n"
        f"sys.exit({status})\n"
    )
    monkeypatch.setattr(repeat, "keep", lambda *what: None)
    words = ["--make", f"{sys.executable} {program}", "--record", str(tmp_path / "outcomes")]
    words += [
        "--times",
        "4",
        "--at-once",
        "3",
        "--stage-times",
        "1",
        "--busy",
        "1",
        "--only",
        "mpi-4",
    ]
    assert repeat.main(words) == bool(status)
    calls = (tmp_path / "calls").read_text().splitlines()
    named = [tests for stage, tests in repeat.TESTS if stage == "mpi-4"]
    assert len(calls) == 2 * len(named) + 1 and calls.count("['mpi-4'] 0") == 1
    for turn, runs in ((0, 3), (3, 1)):
        tests = f"TESTS=-p tests.tools.late_rank --count {runs} {named[0]}"
        assert f"{['mpi-4', 'ALTERNATE=', tests]} {turn}" in calls
    assert f"3 of 4 runs: mpi-4 {named[0]}" in capsys.readouterr().out


def test_the_named_tests_exist():
    for _, tests in repeat.TESTS:
        for path in tests.partition(" -k ")[0].split():
            assert (repeat.ROOT / path).exists(), path


def test_busy_processes_end_with_the_block():
    with repeat.busy(2) as processes:
        assert [process.poll() for process in processes] == [None, None]
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2


def test_each_rank_is_the_late_one_at_some_turn():
    assert {late_rank.late_rank("a.py::test", 3, turn) for turn in range(3)} == {0, 1, 2}
