"""Files of made parts: rings of ranks whose clocks' truth is known."""

import threading
import time
from pathlib import Path
from unittest import mock

import pytest

from mpidist.comm.recorder.ring import Ring
from mpidist.trace.chrome_file import Reading
from mpidist.trace.clocks import Offset
from mpidist.trace.session import Part, alone, write
from mpidist.trace.summary import read

SECOND = 10**9
ZERO = 5 * SECOND  # of rank 0's clock
ERROR_NS = 2000


def part(rank, clock, entries, size=3, label="world", **changed):
    """Return the part of a rank.

    Args:
        rank: Its number.
        clock: From rank 0's clock to the rank's, in ns.
        entries: (kind, operation, begin and end on rank 0's clock, fields of ``Ring.begin``).
    """
    now = [0]
    with mock.patch.object(time, "monotonic_ns", side_effect=lambda: now[0]):
        ring = Ring(None)
    name = ring.group(label, "world1", range(size))
    for kind, operation, begin, end, fields in entries:
        now[0] = clock(ZERO + begin)
        number = ring.begin(ring.signature(kind, operation, name, "float32", (4,)), **fields)
        if end is not None:
            now[0] = clock(ZERO + end)
            ring.end(number)

    def offset(moment, error):
        return list(Offset(clock(moment), moment - clock(moment) + error, ERROR_NS))

    about = {
        "rank": rank,
        "host": "n",
        "pid": rank,
        "lost": 0,
        "problem": "",
        "groups": {name: ["world1", list(range(size))]},
        "clock": [offset(ZERO, rank * 700), offset(ZERO + 10 * SECOND, -rank * 700)],
        "clock_error_us": ERROR_NS / 1e3,
        "clock_jumped": False,
        "wall": [[0, 0], [SECOND, SECOND]],
        "threads": {},
        "main_thread": threading.get_native_id(),
        "tuning": [],
    }
    slots = b"".join(
        slot
        for number in range(1, len(entries) + 1)
        for slot in [ring.copied_slots()[number * 64 : number * 64 + 64]]
    )
    return Part({**about, **changed}, ring.copied_table(), slots)


def facts(parts, size=3):
    return {
        "version": 1,
        "trace": "t",
        "size": size,
        "zero_ns": ZERO,
        "duration_us": 1e7,
        "ranks": [one.about for one in parts],
        "tuning": [],
    }


def clocks():
    """Return the clocks of three ranks: rank 0's, and two with offsets and drifts."""
    return [
        lambda t: t,
        lambda t: int(t * (1 + 8e-5)) - 7 * SECOND,
        lambda t: int(t * (1 - 5e-5)) + 3 * 10**6,
    ]


def made(count=40, **changed):
    """Return the parts of three ranks with collectives, a message and a call."""
    parts = []
    for rank, clock in enumerate(clocks()):
        entries = [
            ("collective", "all_reduce", k * SECOND // 5 + rank * 10**5, k * SECOND // 5 + 10**6,
             {"sequence": k + 1, "size_bytes": 16})
            for k in range(count)
        ]  # fmt: skip
        if rank == 0:
            entries += [("send", "send", 10, 20, {"peer": 1, "tag": 4, "size_bytes": 16})]
            entries += [("call", "f", 9 * SECOND, None, {"peer": 2, "tag": 9})]
        if rank == 1:
            entries += [("receive", "recv", 5, 9000, {"peer": 0, "tag": 4, "size_bytes": 16})]
        if rank == 2:
            entries += [("handler", "f", 9 * SECOND + 10**5, 9 * SECOND + 2 * 10**5,
                         {"peer": 0, "tag": 9})]  # fmt: skip
        # The groups' names differ between ranks; their keys do not.
        parts.append(part(rank, clock, entries, label=f"name{rank}", **changed))
    return parts


def test_times_are_true_within_the_stated_error(tmp_path):
    parts = made()
    assert write(tmp_path / "t.json.gz", facts(parts), iter(parts)) == []
    reading = Reading(tmp_path / "t.json.gz")
    error_us = max(row["clock_error_us"] for row in reading.facts["mpidist"]["ranks"])
    slices = [event for event in reading.events() if event["ph"] == "X"]
    collectives = {}
    for event in slices:
        if event["cat"] == "collective":
            k = event["args"]["sequence"] - 1
            true_us = k * 2e5 + event["pid"] * 100
            assert abs(event["ts"] - true_us) <= error_us
            collectives.setdefault(k, []).append(event)
    assert len(collectives) == 40
    for events in collectives.values():
        assert min(e["ts"] + e["dur"] for e in events) > max(e["ts"] for e in events)


def test_arrows_have_both_ends_within_their_slices(tmp_path):
    parts = made()
    write(tmp_path / "t.json", facts(parts), parts)
    events = list(Reading(tmp_path / "t.json").events())
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    names = [event["name"] for event in starts.values()]
    assert {name: names.count(name) for name in set(names)} == {
        "last": 80, "message": 1, "call": 1, "answer": 1,
    }  # fmt: skip
    slices = [event for event in events if event["ph"] == "X"]
    for one in [*starts.values(), *ends.values()]:
        assert any(
            (two["pid"], two["tid"]) == (one["pid"], one["tid"])
            and two["ts"] <= one["ts"] <= two["ts"] + two["dur"]
            for two in slices
        )
    assert {event["pid"] for event in starts.values() if event["name"] == "last"} == {2}


def test_summary_reads_the_file(tmp_path):
    parts = made(lost=3)
    parts[1].about["problem"] = "the disk is full"
    parts[2].about.update(clock_jumped=True, clock_error_us=9.0)
    remarks = write(tmp_path / "t.json", facts(parts), parts)
    assert [text.partition(" rank ")[2][:1] for text in remarks] == ["0", "1", "1", "2", "2"]
    summary = read(tmp_path / "t.json")
    assert [one.last for one in summary.ranks] == [0, 0, 40]
    assert summary.ranks[2].collectives == 40 and len(summary.notes) == 4
    assert {one.operation for one in summary.bandwidths} == {"all_reduce", "send", "recv"}


def test_parts_of_some_ranks_alone_are_a_trace(tmp_path):
    parts = made()[1:2]
    write(tmp_path / "t.json", facts(parts), parts)
    summary = read(tmp_path / "t.json")
    assert [one.rank for one in summary.ranks] == [1] and summary.ranks[0].collectives == 0
    assert summary.notes == ["2 of 3 ranks are not in the trace"]


@pytest.mark.parametrize(
    ("path", "name"),
    [("a/run.json.gz", "run-rank3.json.gz"), ("run.json", "run-rank3.json"), ("r", "r-rank3")],
)
def test_file_of_one_rank(path, name):
    assert alone(Path(path), 3) == Path(path).with_name(name)
