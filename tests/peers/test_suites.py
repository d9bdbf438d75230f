"""Command lines of suites."""

from itertools import pairwise
from pathlib import Path

from tests.peers import jobs, suites
from tests.peers.outcomes import Row, Verdict


def excluded(side: str) -> list[str]:
    words = suites.mpi4py_command(Path("test"), 2, side)
    return [name for flag, name in pairwise(words) if flag == "-e"]


def test_the_peer_runs_what_open_mpi_cannot_do_beside_groups():
    alone, beside = excluded(jobs.PEER), excluded(jobs.OURS)
    assert beside == [*alone, "test_io", "test_p2p_buf_part"]
    assert alone == ["test_spawn", "test_dynproc"]


def test_groups_are_busy_beside_the_suite():
    words = suites.mpi4py_command(Path("test"), 2, jobs.OURS)
    assert words[words.index("-m") + 1 :][:2] == ["tests.peers.beside_groups", "test/main.py"]
    assert "-m" not in suites.mpi4py_command(Path("test"), 2, jobs.PEER)


def test_a_known_cause_stands_beside_what_fails_on_mpidist_alone():
    suite = suites.TestSuite("theirs", (), causes={"test_b": "private"})
    names = {"A::test_a": Verdict.OURS_FAILS, "A::test_b": Verdict.OURS_FAILS}
    rows = [Row(name, verdict, note="x") for name, verdict in names.items()]
    rows.append(Row("C::test_b", Verdict.BOTH_FAIL, note="x"))
    assert [row.note for row in suites.explained(rows, suite)] == ["x", "private", "x"]
