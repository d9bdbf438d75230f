"""Figures of made events."""

import pytest

from mpidist.trace.chrome_file import text_of, written
from mpidist.trace.summary import read, summary
from tests.trace.made import facts, rank_facts

MAIN = [
    {
        "ph": "M",
        "pid": rank,
        "tid": 0,
        "name": "thread_name",
        "args": {"name": "main", "is_main": True},
    }
    for rank in range(3)
]


def collective(rank, begin, end, sequence=1, size=1000, tid=0, name="all_reduce", group="world"):
    return {
        "ph": "X", "name": name, "cat": "collective", "pid": rank, "tid": tid, "ts": begin,
        "dur": end - begin, "args": {"group": group, "sequence": sequence, "bytes": size},
    }  # fmt: skip


def figures(events, size=3, **changed):
    return summary(facts(size, **changed)["mpidist"], [*MAIN, *events])


def test_lateness_and_waits():
    found = figures(
        [collective(rank, 100 * rank, 250, number) for number in (1, 2) for rank in range(3)]
    )
    assert [(one.collectives, one.last, one.late_us, one.waited_us) for one in found.ranks] == [
        (2, 0, -100.0, 400.0), (2, 0, 0.0, 200.0), (2, 2, 100.0, 0.0),
    ]  # fmt: skip
    assert [(wait.rank, wait.peer, wait.seconds) for wait in found.waits] == [
        (0, 2, 2e-4), (0, 2, 2e-4), (1, 2, 1e-4), (1, 2, 1e-4),
    ]  # fmt: skip
    # From the last arrival to the last end.
    (band,) = found.bandwidths
    assert (band.operation, band.size_bytes, band.transfers, band.time_us) == (
        "all_reduce",
        1024,
        2,
        50,
    )
    assert band.gigabytes_per_s == pytest.approx(1000 / 50e-6 / 1e9) and band.tuned == ""


def test_exposed_time_is_the_main_threads_and_counts_once():
    call = {
        "ph": "X",
        "name": "f",
        "cat": "call",
        "pid": 0,
        "tid": 0,
        "ts": 40,
        "dur": 30,
        "args": {},
    }
    found = figures([
        collective(0, 0, 50), call, collective(0, 0, 500, 2, tid=1),
        {**call, "cat": "step", "ts": 600}, {**call, "pid": 1_000_000},
        # A wait for what another thread executes, which is no transfer by itself.
        {**call, "cat": "wait", "ts": 700, "args": {"bytes": 8}},
    ])  # fmt: skip
    assert [wait.operation for wait in found.waits].count("f") == 1 and not found.bandwidths
    assert found.ranks[0].exposed_us == 100 and found.ranks[0].recorded_us == 1e6


def test_ten_longest_waits():
    events = [
        {"ph": "X", "name": "recv", "cat": "receive", "pid": 1, "tid": 0, "ts": 0, "dur": number,
         "args": {"peer": 2, "bytes": 8}}
        for number in range(25)
    ]  # fmt: skip
    waits = figures(events).waits
    assert [round(wait.seconds * 1e6) for wait in waits] == list(range(24, 14, -1))
    assert waits[0].peer == 2 and waits[0].operation == "recv"


def test_tuning_table_stands_beside_its_size():
    events = [collective(rank, 0, 50, size=5000) for rank in range(3)]
    events += [collective(rank, 0, 50, 2, size=5000, name="broadcast") for rank in range(3)]
    found = figures(events, tuning=[[4096, "ring"], [1 << 20, "library"]])
    assert {one.operation: one.tuned for one in found.bandwidths} == {
        "all_reduce": "ring", "broadcast": "",
    }  # fmt: skip


def test_straggler_is_named_with_its_host():
    events = [
        collective(rank, 1000 * number + 100 * (rank == 2), 1000 * number + 150, number)
        for number in range(1, 31)
        for rank in range(3)
    ]
    (line,) = figures(events).stragglers
    assert (
        line.startswith("rank 2 on node1 is late at 100% of 30 collectives") and "of 1 ms" in line
    )


def test_some_ranks_alone():
    rows = [rank_facts(0, lost=5), rank_facts(2, clock_jumped=True, clock_error_us=5000.0)]
    found = figures([collective(rank, 0, 50) for rank in (0, 2)], ranks=rows)
    assert [one.collectives for one in found.ranks] == [0, 0] and not found.bandwidths
    assert found.notes == [
        "1 of 3 ranks are not in the trace",
        "rank 0 has lost 5 entries, which were overwritten before they were read",
        "the clock of rank 2 has jumped: its times may be wrong by 5000 us",
    ]


def test_file_of_another_program_is_refused(tmp_path):
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match=r"is no trace of mpidist\.trace\.record"):
        read(path)
    with written(path) as file:
        file.begin(facts(1))
        file.write([text_of(collective(0, 0, 5))])
    assert len(read(path).ranks) == 1
