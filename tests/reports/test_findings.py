"""Findings about made jobs: the most important first."""

import time
from dataclasses import replace

import pytest

from mpidist.comm.recorder.recording import Ended, Kind
from mpidist.comm.watchdog.thread_stacks import Line, Stack
from mpidist.reports import findings as of
from mpidist.reports import operations
from mpidist.reports.job import ENDED, RUNS, STOPPED
from tests.reports.made import collective, entry, job

BEFORE = collective(1, 1, 2)


def said(made):
    return [finding.text for finding in of.findings(made)]


def words(last):
    return of.words(job([BEFORE, last]), 0)


def test_a_good_job_has_none():
    assert said(job([BEFORE], [BEFORE])) == []


def test_a_missing_rank_is_named_with_what_it_is_in():
    made = job([BEFORE, collective(2, 3)], [BEFORE, collective(2, 4)], [BEFORE])
    (finding,) = of.findings(made)
    assert finding.text == (
        'rank 2 has not called all_reduce number 2 of group "world", which ranks 0, 1 are in for '
        "17 s"
    )
    assert finding.details == (
        'rank 2: in none; all_reduce number 1 of "world" (5,) float32 ended 18 s ago',
    )
    assert finding.remedy == "look at what rank 2 is in, and its stack"


def test_a_missing_rank_is_named_with_the_line_that_it_is_at():
    stacks = [
        Stack((Line("x.py", 1, "run"),), 3, "another"),
        Stack((Line("/x/train.py", 13, "load_data"),), 1, "MainThread"),
    ]
    (finding,) = of.findings(job([BEFORE, collective(2, 3)], [BEFORE], stacks={1: stacks}))
    assert finding.details[0].endswith("18 s ago; at /x/train.py:13 in load_data()")


def test_a_rank_without_a_file_is_said_to_have_none():
    made = job([BEFORE, collective(2, 3)], [BEFORE], size=3)
    assert said(made)[0].endswith("of rank 2 there is no file")


def test_a_rank_that_may_have_called_a_collective_is_not_said_to_have_missed_it():
    made = job([collective(2, 3)], [entry(9, Kind.STEP, "SGD", 4, end_s=5)], [])
    made.recordings[1] = replace(made.recordings[1], overwritten=8, oldest=9)
    (finding,) = of.findings(made)
    assert finding.text.startswith("rank 2 has not called all_reduce number 2")
    assert finding.text.endswith("which rank 0 is in for 17 s; of rank 1 it is not known")
    made.recordings[2].entries.append(collective(2, 3, 4))
    (finding,) = of.findings(made)
    assert finding.text == (
        'it is not known whether rank 1 has called all_reduce number 2 of group "world", which '
        "rank 0 is in for 17 s: the recording has later entries alone"
    )
    assert finding.details == ("rank 1: in none; SGD ended 15 s ago",)


@pytest.mark.parametrize(("state", "word"), [(STOPPED, "is stopped"), (ENDED, "has ended")])
def test_a_process_that_is_stopped_or_killed_comes_first(state, word):
    made = job([BEFORE, collective(2, 3)], [BEFORE], states=(RUNS, state))
    first, second = said(made)
    assert first.startswith(f"rank 1 {word}") and "rank 1 has not called" in second
    # A job that has ended as a whole has no dead among the living.
    ended = job([BEFORE, collective(2, 3)], [BEFORE], states=(ENDED, ENDED))
    assert len(said(ended)) == 1


def test_other_calls_come_before_the_wait_that_they_cause():
    made = job([BEFORE, collective(2, 3, shape=(6,))], [BEFORE, collective(2, 3)], [BEFORE])
    first, second = said(made)
    assert first == (
        "rank 1 called all_reduce (5,) float32 where rank 0 called all_reduce (6,) float32, as "
        'number 2 of group "world"'
    ) or first.startswith("rank 0 called")
    assert "rank 2 has not called" in second


def test_calls_in_a_circle_are_named_with_their_lock():
    f = dict(peer=1, tag=7, thread=1)
    g = dict(peer=0, tag=3, thread=2)
    made = job(
        [entry(1, Kind.CALL, "f", 1, **f), entry(2, Kind.HANDLER, "g", 3, peer=1, tag=3, thread=4)],
        [entry(1, Kind.HANDLER, "f", 2, peer=0, tag=7, thread=2), entry(2, Kind.CALL, "g", 3, **g)],
        workers=["worker0"],
        stacks={0: [Stack((Line("x/threading.py", 9, "wait"), Line("train.py", 5, "g")), 4)]},
    )
    (finding,) = of.findings(made)
    assert finding.text == "calls wait for each other: worker0 -> rank 1 -> worker0"
    assert finding.details[-1] == (
        "worker0 waits for a lock there, at train.py:5 in g(); the thread in f may hold it"
    )
    assert "rpc_async" in finding.remedy


def test_a_circle_that_a_timeout_has_broken_is_named_after_it():
    """The caller gives up its lock behind its timeout, and both handlers end."""
    f = dict(peer=1, tag=7, thread=1, end_s=6, failed=True)
    g = dict(peer=0, tag=3, thread=2, end_s=6.1)
    ranks = (
        [
            entry(1, Kind.CALL, "f", 1, **f),
            entry(2, Kind.HANDLER, "g", 1.2, peer=1, tag=3, thread=4, end_s=6.05),
        ],
        [
            entry(1, Kind.HANDLER, "f", 1.1, peer=0, tag=7, thread=2, end_s=6.2),
            entry(2, Kind.CALL, "g", 1.2, **g),
        ],
    )
    (finding,) = of.findings(job(*ranks, workers=["worker0"], states=(ENDED, ENDED)))
    assert finding.text == (
        "calls waited for each other until a timeout: worker0 -> rank 1 -> worker0"
    )
    assert finding.details == (
        "worker0 waits 4.5 s for f of rank 1",
        "rank 1, as its handler, waits 4.3 s for g of worker0",
        "worker0 runs it, or waits for a lock there",
    )
    assert "rpc_async" in finding.remedy
    assert said(job(*ranks, now_s=66.5)) == []  # and it has gone on for a minute
    # Its handler may still wait for the other call.
    inner, waits = ranks[1][1], {**g, "end_s": None}
    ranks[1][1] = entry(2, Kind.CALL, "g", 1.2, **waits)
    texts = said(job(*ranks, workers=["worker0"], states=(ENDED, ENDED)))
    assert texts == [finding.text, "a call waits for its answer: rank 1 -> worker0"]
    ranks[1][1] = inner
    # A call that fails soon is an error of its handler.
    ranks[0][0] = entry(1, Kind.CALL, "f", 1, **(f | {"end_s": 1.9}))
    assert said(job(*ranks)) == []


def test_a_rank_that_a_signal_may_have_ended_has_another_remedy():
    ranks = [BEFORE, collective(2, 3)], [BEFORE]
    (ended,) = of.findings(job(*ranks, states=(ENDED, ENDED)))
    assert "sacct" in ended.remedy and ended.remedy.endswith("what rank 1 is in, and its stack")


NAN = Ended("MpidistError", "it has a NaN", (("/x/train.py", 10, "<module>"),))
TIMEOUT = Ended("CommTimeout", "past its timeout", (("/x/train.py", 9, "step"),))


def test_an_exception_is_named_in_the_place_of_the_wait_that_it_causes():
    ranks = [BEFORE, collective(2, 3)], [BEFORE]
    (finding,) = of.findings(job(*ranks, states=(ENDED, ENDED), ended={1: NAN}))
    assert finding.text == "rank 1 raised MpidistError at /x/train.py:10: it has a NaN"
    assert "[rank 1]" in finding.remedy and "signal" not in finding.remedy
    # Others are at any place when it ends them, but no signal has.
    first, second = of.findings(job(*ranks, [BEFORE], states=(ENDED,) * 3, ended={1: NAN}))
    assert first.text == finding.text and "ranks 1, 2 have not called" in second.text
    assert second.remedy == "look at what ranks 1, 2 are in, and their stack"
    assert second.details[0].endswith(" ago; it raised MpidistError at /x/train.py:10")
    # Their process lives for a moment.
    assert said(job(*ranks, states=(RUNS, ENDED), ended={1: NAN})) == [finding.text]
    (alone,) = of.findings(job([BEFORE], states=(ENDED,), ended={0: NAN}))
    assert alone.text.startswith("rank 0 raised") and "[rank" not in alone.remedy


def test_ranks_that_raise_the_same_there_are_one_finding():
    ended = {0: NAN, 1: NAN._replace(frames=()), 2: NAN._replace(text="x" * 900)}
    first, second = said(job(*[[BEFORE]] * 3, states=(ENDED,) * 3, ended=ended))
    assert first == "ranks 0, 2 raised MpidistError at /x/train.py:10: it has a NaN"
    assert second == "rank 1 raised MpidistError: it has a NaN"
    (long,) = said(job([BEFORE], states=(ENDED,), ended={0: ended[2]}))
    assert len(long) < 500 and long.endswith("x...")


@pytest.mark.parametrize("end", [TIMEOUT, Ended("", "no return from MPI within 2 s")])
def test_the_end_by_a_timeout_is_named_where_nothing_else_is_found(end):
    ranks = [BEFORE, collective(2, 3)], [BEFORE]
    (finding,) = of.findings(job(*ranks, states=(ENDED, ENDED), ended={0: end}))
    assert finding.text.startswith("rank 1 has not called all_reduce number 2")
    assert finding.remedy == "look at what rank 1 is in, and its stack"
    (finding,) = of.findings(job([BEFORE], [BEFORE], states=(ENDED, ENDED), ended={0: end}))
    assert finding.text.startswith("rank 0 ") and end.text in finding.text
    assert ("traceback" in finding.remedy) == bool(end.type_name)


def test_a_call_of_a_moment_is_no_finding_while_the_job_runs():
    made = [entry(1, Kind.CALL, "f", 19.5, peer=1, tag=7)], []
    assert said(job(*made)) == []
    assert said(job(*made, states=(ENDED, ENDED))) == [
        "a call waits for its answer: rank 0 -> rank 1"
    ]


def test_receives_that_wait_for_each_other_are_named():
    made = job(
        [entry(1, Kind.RECEIVE, "recv", 1, peer=1, tag=2)],
        [entry(1, Kind.RECEIVE, "recv", 1, peer=0, tag=2)],
        [entry(1, Kind.RECEIVE, "recv", 1, peer=0, tag=2)],
    )
    (finding,) = of.findings(made)
    assert finding.text == "ranks wait for messages of each other: rank 0 -> rank 1 -> rank 0"
    assert finding.details[0] == "rank 0: recv from rank 1 tag 2"


def test_a_collective_that_all_have_entered_is_named_last():
    assert said(job([collective(1, 1)], [collective(1, 2)])) == [
        'ranks 0, 1 are in all_reduce number 1 of group "world" for 19 s, and all others have come'
    ]


def test_ranks_that_wait_in_different_calls_have_no_transfer_under_way():
    """Neither at the difference, nor in what they all call behind it."""
    made = job([BEFORE, collective(2, 3, operation="broadcast")], [BEFORE, collective(2, 3)])
    (text,) = said(made)
    assert text.startswith("rank 1 called all_reduce where rank 0 called broadcast")
    passed = [BEFORE, collective(2, 3, 4, "broadcast")], [BEFORE, collective(2, 3, 4)]
    (text,) = said(job(*([*each, collective(3, 5)] for each in passed)))
    assert "as number 2" in text


def test_a_last_operation_that_failed_is_not_said_to_have_ended():
    failed = collective(2, 3, 4, failed=True)
    assert words(failed).endswith("float32 failed 16 s ago")
    assert words(collective(2, 3, 4)).endswith("float32 ended 16 s ago")


def test_a_large_job_is_read_in_seconds():
    """64 ranks with whole rings; the time is told, and has no limit here."""
    ring = [collective(number, number, number + 0.5) for number in range(1, 4096)]
    made = job(*([*ring, collective(4096, 4097)] if rank else ring for rank in range(64)))
    start = time.perf_counter()
    texts = said(made)
    operations.rows(made, 20)
    print(f"{time.perf_counter() - start:.2f} s")
    assert texts[0].startswith("rank 0 has not called all_reduce number 4096")
