"""Traces of this job's ranks, and of jobs that ask for one by a variable."""

import contextlib
import gzip
import json
import os

import pytest
import torch

import mpidist.rpc as rpc
from mpidist.comm.recorder import recorder
from mpidist.errors import DisagreementError, MpidistError
from mpidist.trace import merge, record, timeline
from mpidist.trace.chrome_file import Reading
from mpidist.trace.summary import read
from tests.tools.support import agree, raises_on_all, short_job


@pytest.fixture(autouse=True)
def _own_recorder(monkeypatch):
    """Give each test a recorder of its own: those of hundreds of tests before have filled one."""
    monkeypatch.setattr(recorder, "_recorder", None)
    monkeypatch.setattr(recorder, "_world", None)


@pytest.fixture
def folder(group, tmp_path):
    """Return one folder for all ranks."""
    return type(tmp_path)(group.all_gather_object(str(tmp_path))[0])


def complaint(events, facts):
    """Return what is wrong with the order and the arrows of a trace; "" if nothing is."""
    error_us = 2 * max(row["clock_error_us"] for row in facts["ranks"])
    slices = [event for event in events if event["ph"] == "X"]
    calls = {}
    for event in slices:
        if event["cat"] == "collective":
            key = event["args"]["group"], event["args"]["sequence"]
            calls.setdefault(key, []).append(event)
    for (group, number), ranks in calls.items():
        last = max(event["ts"] for event in ranks)
        first = min(event["ts"] + event["dur"] for event in ranks)
        is_left_early = ranks[0]["name"].startswith(("broadcast", "scatter", "gather", "reduce"))
        if first < last - error_us and not is_left_early:
            return f"{group} {number} ended {last - first} us before its last rank came"
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    if starts.keys() != ends.keys():
        return "arrows without an end"
    for number, one in starts.items():
        for end in (one, ends[number]):
            if not any(
                (two["pid"], two["tid"]) == (end["pid"], end["tid"])
                and two["ts"] - 1e-3 <= end["ts"] <= two["ts"] + two["dur"] + 1e-3
                for two in slices
            ):
                return f"an arrow outside of the slices: {end}"
        if one["ts"] > ends[number]["ts"] + error_us:
            return f"an arrow back in time: {one} {ends[number]}"
    return ""


@pytest.mark.mpi
@pytest.mark.parametrize("leaves", ["by an exception", "at its end", "with MPI"])
def test_a_forked_child_that_leaves_the_trace_writes_nothing(group, folder, leaves):
    path, child, left = folder / "run.json", -1, 1
    try:
        with record(path):
            group.barrier()
            child = os.fork()
            if child == 0 and leaves == "by an exception":
                raise KeyboardInterrupt
            if child == 0 and leaves == "with MPI":
                timeline._drop()
            elif child:
                ended = os.waitpid(child, 0)[1]
                there = sorted(file.name for file in folder.iterdir())
        left = 3
    except KeyboardInterrupt:
        left = 4
    finally:
        if child == 0:
            os._exit(left)
    told = group.all_gather_object([os.waitstatus_to_exitcode(ended), there])
    expected = [4 if leaves == "by an exception" else 3, []]
    agree(group, told == [expected] * group.size, f"{told}")
    is_whole = group.rank or json.loads(path.read_text())["otherData"]["mpidist"]["size"]
    agree(group, is_whole == (group.rank or group.size))


@pytest.mark.mpi
def test_trace_has_all_ranks_and_their_arrows(group, folder):
    path, last = folder / "run.json.gz", group.size - 1
    x = torch.ones(100)
    group.all_reduce(x)  # before the trace
    with record(path):
        for _ in range(10):
            group.all_reduce(x)
        if group.size > 1 and group.rank == 0:
            group.send(x, last, tag=3)
        if group.size > 1 and group.rank == last:
            group.recv(x, 0, tag=3)
    group.all_reduce(x)  # and after it
    wrong = ""
    if group.rank == 0:
        with gzip.open(path, "rt") as file:
            whole = json.load(file)
        events, facts = whole["traceEvents"], whole["otherData"]["mpidist"]
        wrong = complaint(events, facts)
        names = [event["name"] for event in events if event["ph"] == "s"]
        expected = {"last": 10 * last, "message": int(group.size > 1)}
        found = {name: names.count(name) for name in expected}
        count = sum(event["name"] == "all_reduce" for event in events if event["ph"] == "X")
        if (count, found) != (10 * group.size, expected):
            wrong = f"{count} all-reduces, arrows {found}"
        if [row["rank"] for row in facts["ranks"]] != list(range(group.size)):
            wrong = "ranks are missing"
        # Of one node: they read one clock.
        if any(row["clock_error_us"] for row in facts["ranks"]):
            wrong = "clocks differ"
    agree(group, not wrong, wrong)


@pytest.mark.mpi
def test_nested_traces_are_both_written(group, folder):
    with record(folder / "outer.json"):
        group.barrier()
        with record(folder / "inner.json"):
            group.barrier()
    counts = [
        sum(one.collectives for one in read(folder / f"{name}.json").ranks[:1])
        for name in ("outer", "inner")
    ]
    agree(group, group.size == 1 or counts == [2, 1], str(counts))


@pytest.mark.mpi
def test_a_relative_file_is_in_the_folder_of_the_begin(group, folder, monkeypatch):
    (folder / "other").mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    left = record("left.json")
    left.__enter__()
    with record("run.json"):
        group.barrier()
        monkeypatch.chdir(folder / "other")
    with contextlib.suppress(KeyError):
        left.__exit__(KeyError, KeyError(), None)
    group.barrier()
    names = ["run.json", *(f"left-rank{rank}.json" for rank in range(group.size))]
    agree(group, {path.name for path in folder.iterdir()} == {"other", *names})


@pytest.mark.mpi
def test_file_that_cannot_be_written_raises_on_all_ranks(group, folder):
    for path in (folder / "none" / "t.json", folder):
        text = raises_on_all(group, OSError, record(path).__enter__, "cannot be written by rank 0")
        assert str(folder) in text
    group.barrier()


@pytest.mark.mpi(min_size=2)
def test_calls_of_several_init_rpc_have_an_arrow_each(group, folder):
    path, to = folder / "calls.json", (group.rank + 1) % group.size
    with record(path):
        for turn in range(3):
            rpc.init_rpc(f"worker{group.rank}", group=group)
            for _ in range(turn + 1):
                rpc.rpc_sync(to, abs, args=(-1,))
            rpc.shutdown()
    ok, names = True, []
    if group.rank == 0:
        events = json.loads(path.read_text())["traceEvents"]
        names = [event["name"] for event in events if event["ph"] == "s"]
        ok = names.count("call") == names.count("answer") == 6 * group.size
    agree(group, ok, str(names))


@pytest.mark.mpi(min_size=2)
def test_ranks_that_name_other_files_are_refused(group, folder):
    context = record(folder / f"{group.rank}.json")
    raises_on_all(group, DisagreementError, context.__enter__, "0.json")


@pytest.mark.mpi
def test_recorder_that_is_off_on_a_rank_is_refused(group, folder, monkeypatch):
    if group.rank == group.size - 1:
        monkeypatch.setattr(recorder, "of_process", lambda: recorder.Off())
    context = record(folder / "t.json")
    text = raises_on_all(group, MpidistError, context.__enter__, "MPIDIST_RECORDER=0")
    assert f"off on rank {group.size - 1}" in text


@pytest.mark.mpi
def test_rank_that_leaves_by_an_exception_writes_its_part(group, folder):
    with contextlib.suppress(ZeroDivisionError), record(folder / "run.json"):
        group.all_reduce(torch.ones(3))
        raise ZeroDivisionError
    group.barrier()
    parts = [folder / f"run-rank{rank}.json" for rank in range(group.size)]
    ok = all(path.exists() for path in parts) and not (folder / "run.json").exists()
    agree(group, ok, str(list(folder.iterdir())))
    if group.rank == 0:
        merge(folder / "all.json", parts)
        reading = Reading(folder / "all.json")
        assert not complaint(list(reading.events()), reading.facts["mpidist"])
        assert [one.collectives for one in read(folder / "all.json").ranks] == [
            int(group.size > 1)
        ] * group.size


_JOB = """
import time, torch
import mpidist.comm as comm, mpidist.rpc as rpc

group = comm.init()
x = torch.zeros(1000)
end = time.monotonic() + 4
while x[0] < group.size:
    time.sleep(0.06 * (group.rank == 1))
    x.fill_(time.monotonic() > end)
    group.all_reduce(x)
    x *= group.size  # one rank's time is enough
rpc.init_rpc(f"worker{group.rank}")
rpc.rpc_sync(f"worker{(group.rank + 1) % group.size}", torch.add, (x, 1))
if group.rank == 0:
    group.send(x, 2)
if group.rank == 2:
    group.recv(x, 0)
rpc.shutdown()
"""


@pytest.mark.slow
def test_job_with_the_variable_writes_a_trace_and_names_its_straggler(tmp_path):
    path = tmp_path / "job.json"
    done = short_job(3, _JOB, env={"MPIDIST_TRACE": str(path), "MPIDIST_STRAGGLERS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is late at") == 1 and "rank 1 on " in done.stderr, done.stderr
    whole = json.loads(path.read_text())
    events, facts = whole["traceEvents"], whole["otherData"]["mpidist"]
    assert complaint(events, facts) == ""
    names = [event["name"] for event in events if event["ph"] == "s"]
    assert names.count("message") >= 1 and names.count("call") >= 3 <= names.count("answer")
    summary = read(path)
    assert summary.ranks[1].last > 0.8 * summary.ranks[1].collectives
    assert any(line.startswith("rank 1 on ") for line in summary.stragglers)
