"""Profiles of torch beside a made trace of two ranks."""

import json
import os
import time

import pytest
import torch

from mpidist.trace.chrome_file import Reading, text_of, written
from mpidist.trace.torch_profiles import merge, rank_of
from tests.trace.made import facts, rank_facts


def own(path, ranks, size=2):
    with written(path) as file:
        file.begin(facts(size, ranks))
        file.write([text_of({"ph": "X", "name": "all_reduce", "pid": 0, "tid": 0, "ts": 1.0})])
    return path


def profile(path, events=(), **fields):
    path.write_text(json.dumps({"traceEvents": list(events), **fields}))
    return path


BASE = 10**18
MARK = {"ph": "X", "name": "mark", "pid": 9, "tid": 9, "ts": 2000.5, "dur": 1.0}


def test_profile_is_laid_on_the_clock_of_the_trace(tmp_path):
    """Rank 1's wall clock is 1 ms ahead at the begin, and runs a ten-thousandth too fast."""
    wall = [[BASE + 10**6, 500], [BASE + 10**6 + 10**9 + 10**5, 500 + 10**9]]
    trace = own(tmp_path / "t.json", [rank_facts(0), rank_facts(1, wall=wall)])
    arrow = {"ph": "s", "name": "ac2g", "id": 4, "cat": "ac2g", "pid": 9, "tid": 9, "ts": 2000.5}
    name = {"ph": "M", "name": "process_name", "pid": 9, "args": {"name": "python"}}
    order = {"ph": "M", "name": "process_sort_index", "pid": 9, "args": {"sort_index": 9}}
    files = [
        profile(
            tmp_path / f"p{rank}.json",
            [MARK, arrow, {**arrow, "ph": "f"}, name, order],
            baseTimeNanoseconds=BASE,
            distributedInfo={"rank": rank},
        )
        for rank in (0, 1)
    ]
    assert merge(tmp_path / "out.json.gz", [files[0], trace, files[1]]) == []
    reading = Reading(tmp_path / "out.json.gz")
    assert reading.facts == Reading(trace).facts
    events = list(reading.events())
    marks = [event for event in events if event["name"] == "mark"]
    assert marks[0]["ts"] == 2000.5
    assert marks[1]["ts"] == pytest.approx(1000.5 / (1 + 1e-4) + 0.5, abs=2e-3)
    assert marks[1]["dur"] == 1.0
    assert len({0, 1, marks[0]["pid"], marks[1]["pid"]}) == 4
    arrows = [event["id"] for event in events if event["name"] != "mark" and "id" in event]
    assert len(arrows) == 4 and len(set(arrows)) == 2
    names = [event["args"] for event in events if event["name"] == "process_name"]
    assert names == [{"name": "rank 0: torch, python"}, {"name": "rank 1: torch, python"}]
    assert sum(event["name"] == "all_reduce" for event in events) == 1


def test_wall_clock_that_was_set_is_said(tmp_path):
    ranks = [rank_facts(0), rank_facts(1, wall=[[BASE, 0], [BASE + 3 * 10**9, 10**9]])]
    trace = own(tmp_path / "t.json", ranks)
    file = profile(tmp_path / "rank1.json", [MARK], baseTimeNanoseconds=BASE)
    (remark,) = merge(tmp_path / "out.json", [trace, file])
    assert "wall clock of rank 1 was set" in remark and "2000000 us" in remark


def test_rank_of_a_profile(tmp_path):
    known = facts(2)["mpidist"]

    def found(name, *events, **fields):
        return rank_of(Reading(profile(tmp_path / name, events, **fields)), known)

    assert found("a.json", distributedInfo={"rank": 1}) == 1
    assert found("a.json", {**MARK, "pid": 101}, host_name="node0") == 1
    # A process of that number runs on another host.
    assert found("rank0.json", {**MARK, "pid": 101}, host_name="other") == 0
    assert found("x_rank_1.json.gz") == 1
    for name in ("a.json", "rank5.json"):
        with pytest.raises(ValueError, match="does not say its rank"):
            found(name)


def test_merge_needs_one_trace_of_mpidist(tmp_path):
    file = profile(tmp_path / "rank0.json", [MARK])
    with pytest.raises(ValueError, match="got 0 of 0 traces"):
        merge(tmp_path / "out.json", [file])
    traces = []
    for name in ("a", "b"):
        traces.append(tmp_path / f"{name}.json")
        with written(traces[-1]) as one:
            one.begin(facts(1, trace=name))
    with pytest.raises(ValueError, match="got 2 of 2 traces"):
        merge(tmp_path / "out.json", traces)
    with pytest.raises(ValueError, match="two parts of one rank"):
        merge(tmp_path / "out.json", traces[:1] * 2)
    assert not (tmp_path / "out.json").exists()


def test_parts_that_ranks_wrote_alone_are_joined(tmp_path):
    groups = [[["world1", [0, 1]]], [["half", [1]], ["world1", [0, 1]]]]
    labels = [{"world": 0}, {"half": 0, "world": 1}]
    for rank in (1, 0):
        with written(tmp_path / f"{rank}.json") as file:
            row = rank_facts(rank, groups=labels[rank])
            file.begin(facts(2, [row], groups[rank], trace="t", duration_us=5.0 * rank))
            file.write([text_of({**MARK, "pid": rank})])
    merge(tmp_path / "out.json", [tmp_path / "1.json", tmp_path / "0.json"])
    reading = Reading(tmp_path / "out.json")
    held = reading.facts["mpidist"]
    assert [row["rank"] for row in held["ranks"]] == [0, 1] and held["duration_us"] == 5.0
    assert held["groups"] == [["half", [1]], ["world1", [0, 1]]]
    assert [row["groups"] for row in held["ranks"]] == [{"world": 1}, {"half": 0, "world": 1}]
    assert [event["pid"] for event in reading.events()] == [1, 0]


def test_profile_of_the_installed_torch(tmp_path):
    """The begin of a range of this process, by its wall clock."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as taken:
        torch.profiler.record_function("warm").__enter__()
        before, wall = time.monotonic_ns(), time.time_ns()
        with torch.profiler.record_function("mark"):
            pass
    taken.export_chrome_trace(str(tmp_path / "p.json"))
    # The trace begins a millisecond before the range.
    ends = [[wall - 10**6, 0], [wall + 10**9 - 10**6, 10**9]]
    trace = own(
        tmp_path / "t.json",
        [
            rank_facts(
                0, wall=ends, pid=os.getpid(), host=Reading(tmp_path / "p.json").facts["host_name"]
            )
        ],
        size=1,
    )
    merge(tmp_path / "out.json", [trace, tmp_path / "p.json"])
    (mark,) = [
        event
        for event in Reading(tmp_path / "out.json").events()
        if event["name"] == "mark" and event["ph"] == "X"
    ]
    assert 1000 - 50 <= mark["ts"] <= 1000 + (time.monotonic_ns() - before) / 1e3
