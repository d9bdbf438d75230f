"""Last operations of ranks in the watchdogs' messages and reports."""

import os
import socket
from types import SimpleNamespace

import pytest

from mpidist.comm.mpi.world import Process
from mpidist.comm.recorder.file_format import WORKER
from mpidist.comm.recorder.recording import Kind
from mpidist.comm.recorder.ring import Ring
from mpidist.comm.watchdog import last_operations
from mpidist.comm.watchdog.last_operations import LastOperations
from tests.reports.made import S, collective, entry, recording

RING = [
    entry(1, Kind.CALL, "f", 1, peer=1, tag=7, thread=3),
    *(collective(number, number, number + 0.5) for number in range(2, 10)),
    collective(10, 10, 11, failed=True),
    collective(11, 12),
]


def test_what_is_under_way_and_the_last_that_ended_are_kept_with_their_ages():
    made = recording(0, RING, keys={"w": WORKER, "world": "key", "w0": WORKER})
    last = last_operations.of(made, 20 * S, {3: "train.py:4 in f()", 9: "x"})
    assert [each.number for each in last.entries] == [1, 6, 7, 8, 9, 10, 11]
    assert [each.operation for each in last.under_way] == ["f", "all_reduce"]
    assert last.entries[0].begin_ns == -19 * S and last.entries[-2].end_ns == -9 * S
    assert last.locks == {3: "train.py:4 in f()"}
    assert last_operations.lines({0: last}, [0]) == [
        "  a call waits: w0 -> rank 1",
        "    w0 waits 19.0 s for f of rank 1",
        "    rank 1 has not begun it, or has ended it",
        "  last operations of rank 0:",
        '    all_reduce of "world" (5,) float32: ended 12.5 s ago',
        '    all_reduce of "world" (5,) float32: ended 11.5 s ago',
        '    all_reduce of "world" (5,) float32: ended 10.5 s ago',
        '    all_reduce of "world" (5,) float32: failed 9 s ago',
        '    all_reduce of "world" (5,) float32: under way for 8 s',
    ]


def test_a_silent_rank_of_this_node_is_read_from_its_file(tmp_path, monkeypatch):
    path = tmp_path / "recorder-1"
    ring = Ring(path, "job", 1, 2, 64)
    ring.end(ring.begin(ring.signature("step", "Adam")))
    own = SimpleNamespace(path=tmp_path / "recorder-0")
    monkeypatch.setattr(last_operations.recorder, "of_process", lambda: own)
    host, pid = socket.gethostname(), os.getpid()
    (found,) = last_operations.of_silent(1, Process(pid, host)).entries
    assert found.operation == "Adam" and found.end_ns < 0
    nothing = LastOperations()
    for rank, process in ((1, Process(pid + 1, host)), (1, Process(pid, "far")), (2, (pid, host))):
        assert last_operations.of_silent(rank, Process(*process)) == nothing
    own.path = None
    assert last_operations.of_silent(1, Process(pid, host)) == last_operations.own() == nothing
    ring.close()


def test_a_circle_is_named_once():
    thread = dict(thread=4)
    last = {
        0: LastOperations(
            (
                entry(1, Kind.CALL, "f", -4, peer=1, tag=7),
                entry(2, Kind.HANDLER, "g", -2, peer=1, tag=3, **thread),
            ),
            {4: "train.py:5 in g()"},
            "worker0",
        ),
        1: LastOperations(
            (
                entry(1, Kind.CALL, "g", -3, peer=0, tag=3),
                entry(2, Kind.HANDLER, "f", -2, peer=0, tag=7, **thread),
            ),
            {4: "train.py:9 in f()"},
        ),
    }
    lines = last_operations.lines(last, [])
    assert lines[0] == "  calls wait for each other: worker0 -> rank 1 -> worker0"
    assert len(lines) == 4 and "train.py:5 in g(); the thread in f may hold it" in lines[-1]


def test_plain_data_is_read_back_and_other_data_refused():
    last = last_operations.of(recording(0, RING), 20 * S, {3: "a"})
    rows, locks, worker = plain = last_operations.plain(last)
    assert last_operations.is_plain(plain) and last_operations.from_plain(plain) == last
    assert last_operations.is_plain(last_operations.plain(LastOperations()))
    first = rows[0]
    for wrong in (
        None,
        (rows, locks),
        ([first[:-1]], locks, worker),
        ([("1", *first[1:])], locks, worker),
        ([(1, "other", *first[2:])], locks, worker),
        ([(*first[:6], [5], *first[7:])], locks, worker),
        ([(*first[:-1], 1)], locks, worker),
        (rows, {"3": "a"}, worker),
    ):
        assert not last_operations.is_plain(wrong)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 us"), (2.5e-5, "25 us"), (0.0123, "12.3 ms"), (12.34, "12.3 s"), (4000, "4000 s")],
)
def test_times_have_three_digits(seconds, text):
    assert last_operations.duration(seconds) == text
