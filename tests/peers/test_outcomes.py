"""Outcomes: parsing of what suites report, verdicts, tables."""

import pytest

from tests.peers.outcomes import (
    Outcome,
    Row,
    Verdict,
    joined,
    last_error,
    of_junit,
    of_unittest,
    short,
    summary,
    table,
    verdict,
)

PASSED, FAILED = Outcome("passed"), Outcome("failed", "ValueError: no")


@pytest.mark.parametrize(
    ("ours", "peer", "expected"),
    [
        (PASSED, PASSED, Verdict.PASSED),
        (FAILED, PASSED, Verdict.OURS_FAILS),
        (FAILED, FAILED, Verdict.BOTH_FAIL),
        (PASSED, FAILED, Verdict.PEER_FAILS),
        (Outcome("skipped", "CUDA required"), PASSED, Verdict.GPU),
        (PASSED, Outcome("skipped", "Need at least 2 GPUs"), Verdict.GPU),
        (Outcome("skipped", "broken at head"), PASSED, Verdict.ABSENT),
    ],
)
def test_verdict(ours, peer, expected):
    assert verdict(ours, peer) is expected


def test_the_last_error_is_the_programs_not_the_launchers():
    output = """\
[rank 1]   File "a.py", line 2
[rank 1] torch.distributed.DistBackendError: no peer
[rank 1] mpidist ends the job: DistBackendError uncaught
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
prterun has exited
"""
    assert last_error(output) == "torch.distributed.DistBackendError: no peer"
    assert last_error("one\ntwo\n\n") == "two"
    assert last_error("") == "it printed nothing"


def test_junit():
    text = """<testsuites><testsuite>
      <testcase classname="test_oss.TestSingleRank" name="test_a"/>
      <testcase classname="test_oss" name="test_b[1]"><skipped message="CUDA required"/></testcase>
      <testcase classname="test_oss" name="test_c"><failure message="assert 1"/></testcase>
      <testcase classname="test_oss" name="test_d"><error>E\nValueError: x</error></testcase>
    </testsuite></testsuites>"""
    assert of_junit(text) == {
        "TestSingleRank::test_a": Outcome("passed"),
        "test_oss::test_b[1]": Outcome("skipped", "CUDA required"),
        "test_oss::test_c": Outcome("failed", "assert 1"),
        "test_oss::test_d": Outcome("failed", "ValueError: x"),
    }


def test_unittest():
    text = """\
ERROR: testRecv (test_p2p.TestP2P.testRecv)
FAIL: testSend (test_p2p.TestP2P.testSend)
FAIL: testSend (test_p2p.TestP2P.testSend)
Ran 1590 tests in 60.1s

FAILED (failures=2, errors=1, skipped=12)
"""
    failed = ["test_p2p.TestP2P.testRecv", "test_p2p.TestP2P.testSend"]
    assert of_unittest(text) == (1590, 12, failed)
    assert of_unittest("Ran 3 tests in 0.1s\n\nOK\n") == (3, 0, [])
    with pytest.raises(ValueError, match="did not reach its end"):
        of_unittest("testRecv ... ok\n")


def test_a_test_that_a_run_did_not_reach_has_failed():
    rows = joined({"a": PASSED}, {"a": PASSED, "b": PASSED})
    assert [(row.name, row.verdict) for row in rows] == [
        ("a", Verdict.PASSED),
        ("b", Verdict.OURS_FAILS),
    ]
    assert rows[1].note == "the run ended before it"


def test_a_cell_has_no_path_and_no_markup():
    assert short("File </root/x/y.py> | *\nmore") == "File ‹…/y.py› \\| \\*"
    assert len(short("a" * 500)) == 110


def test_tables():
    rows = [
        Row("a", Verdict.PASSED, 0, 2),
        Row("b", Verdict.OURS_FAILS, 1, 0, "ValueError"),
        Row("c", Verdict.ABSENT, note="absent"),
    ]
    assert summary(rows) == "passed: 1, fails on mpidist: 1, not run: 1"
    assert table(rows, all_rows=True).splitlines()[2:] == [
        "| `a` | passed | 0 | 2 |  |",
        "| `b` | fails on mpidist | 1 | 0 | ValueError |",
        "| `c` | not run |  |  | absent |",
    ]
    assert table(rows, all_rows=False).splitlines()[2:] == [
        "| `b` | fails on mpidist | ValueError |"
    ]
    assert table(rows[:1], all_rows=False) == ""
