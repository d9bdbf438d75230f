"""Events of operations in torch.profiler: their threads, fields and ends."""

import json
import threading
from collections import Counter

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from mpidist.comm import shard_memory
from mpidist.comm.algorithms import shared_memory
from mpidist.comm.execution import profiling
from mpidist.comm.messages.p2p import P2POp
from tests.tools.support import agree

mpi = pytest.mark.mpi(min_size=1)
PREFIX = "mpidist:"


def profiled(all_threads=False):
    """Return a profiler of this thread, or of all threads."""
    config = _ExperimentalConfig(profile_all_threads=all_threads)
    return profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, experimental_config=config
    )


def trace(done, tmp_path):
    """Return our events of a trace in Chrome's format, ordered by their beginning."""
    path = tmp_path / "trace.json"
    done.export_chrome_trace(str(path))
    events = [
        e
        for e in json.loads(path.read_text())["traceEvents"]
        if e.get("ph") == "X" and e["name"].startswith(PREFIX)
    ]
    return sorted(events, key=lambda event: event["ts"])


def counts(done):
    """Return the number of each of our events, without the waits."""
    ours = {
        e.key.removeprefix(PREFIX): e.count for e in done.key_averages() if e.key.startswith(PREFIX)
    }
    return {name: count for name, count in ours.items() if not name.endswith(":wait")}


@mpi
@pytest.mark.parametrize("all_threads", [False, True])
def test_every_operation_is_one_event(group, all_threads):
    size, rank = group.size, group.rank
    t, many, whole = torch.ones(3), [torch.ones(3) for _ in range(size)], torch.ones(3 * size)
    memory = shared_memory.share(group, 64)
    shards = shard_memory.allocate(group, 8 * size)
    parts = [[(8 * place, 8 * place + 8)] for place in range(size)]
    # The fast path has cached the memory now, and must not bypass the profiler.
    group.all_reduce(t)
    with profiled(all_threads) as done:
        for asynchronous in (False, True):
            works = [
                group.all_reduce(t, async_op=asynchronous),
                group.all_reduce_coalesced([t, t.clone()], async_op=asynchronous),
                group.reduce(t, 0, async_op=asynchronous),
                group.broadcast(t, 0, async_op=asynchronous),
                group.all_gather(many, t, async_op=asynchronous),
                group.all_gather_into_tensor(whole, t, async_op=asynchronous),
                group.gather(t, many if rank == 0 else None, 0, async_op=asynchronous),
                group.scatter(t, many if rank == 0 else None, 0, async_op=asynchronous),
                group.reduce_scatter(t, many, async_op=asynchronous),
                group.reduce_scatter_tensor(t, whole, async_op=asynchronous),
                group.all_to_all(many, [m.clone() for m in many], async_op=asynchronous),
                group.all_to_all_single(whole, whole.clone(), async_op=asynchronous),
                group.barrier(async_op=asynchronous),
                group.all_reduce(torch.eye(2).to_sparse(), async_op=asynchronous),
                group.in_order(lambda: None, async_op=asynchronous, operation="stages"),
            ]
            for work in works:
                assert (work is not None) is asynchronous
                if work is not None:
                    work.wait()
        group.broadcast_object("a", 0)
        group.all_gather_object("a")
        group.gather_object("a")
        group.scatter_object(["a"] * size if rank == 0 else None)
        group.monitored_barrier()
        shards.prepare(parts)()
        if memory is not None:
            memory.tensor(0, 8, torch.float32).average()
    found = counts(done)
    twice = (
        "all_reduce_coalesced reduce broadcast gather scatter reduce_scatter reduce_scatter_tensor "
        "all_to_all all_to_all_single stages"
    )
    once = (
        "broadcast_object all_gather_object gather_object scatter_object monitored_barrier "
        "gather_shards"
    )
    expected = dict.fromkeys(twice.split(), 2) | dict.fromkeys(once.split(), 1)
    if memory is not None:
        expected["average"] = 1
    wrong = {
        name: (found.get(name), count)
        for name, count in expected.items()
        if found.get(name) != count
    }
    # Operations of several stages (a sparse sum, an average) record their stages as well, if their
    # thread is recorded.
    least = {"all_reduce": 4, "all_gather": 2, "all_gather_into_tensor": 2, "barrier": 2}
    wrong |= {
        name: (found.get(name), f">= {count}")
        for name, count in least.items()
        if found.get(name, 0) < count
    }
    agree(group, not wrong, f"events, found and expected: {wrong}")


@mpi
def test_an_event_has_shapes_and_the_fields_of_nccl_in_the_thread_that_calls(group, tmp_path):
    with profiled() as done:
        group.all_gather_into_tensor(
            torch.ones(group.size * 6, dtype=torch.bfloat16), torch.ones(2, 3, dtype=torch.bfloat16)
        )
        group.all_reduce(torch.ones(5, dtype=torch.int64), async_op=True).wait()
        group.barrier()
    events = [e for e in trace(done, tmp_path) if not e["name"].endswith(":wait")]
    names = [e["name"].removeprefix(PREFIX) for e in events]
    agree(group, names == ["all_gather_into_tensor", "all_reduce", "barrier"], str(names))
    gathered, reduced, barrier = (e["args"] for e in events)
    fields = {
        "Collective name": "_allgather_base",
        "dtype": "BFloat16",
        "In msg nelems": 6,
        "Out msg nelems": 6 * group.size,
        "Process Group Name": group.name,
        "Process Group Ranks": str(list(group.world_ranks)),
        "Group size": group.size,
        "Rank": group.rank,
        "Seq": 1,
    }
    agree(group, {name: gathered.get(name) for name in fields} == fields, str(gathered))
    agree(
        group,
        gathered["Input Dims"] == [[2, 3]] and reduced["Input Dims"] == [[5]],
        f"{gathered} {reduced}",
    )
    agree(
        group,
        (reduced["Collective name"], reduced["Is asynchronized op"]) == ("allreduce", "True"),
        str(reduced),
    )
    agree(group, "dtype" not in barrier and len({e["tid"] for e in events}) == 1, str(events))


@mpi
def test_a_profile_of_all_threads_has_the_events_in_the_group_s_thread(group, tmp_path):
    gate = threading.Event()

    def first():
        gate.wait(60)
        with record_function(PREFIX + "within the first"):
            pass

    with profiled(all_threads=True) as done:
        works = [
            group.in_order(first, operation="first"),
            group.all_reduce(torch.ones(2), async_op=True),
        ]
        gate.set()
        for work in works:
            work.wait()
        group.barrier()
    events = {e["name"].removeprefix(PREFIX): e for e in trace(done, tmp_path)}
    threads = [events[name]["tid"] for name in ("first", "all_reduce", "barrier", "first:wait")]
    agree(group, threads[0] == threads[1] != threads[2] == threads[3], str(threads))
    # The events are at the times of the executions, one after the other, and not of the calls.
    spans = {name: (event["ts"], event["ts"] + event["dur"]) for name, event in events.items()}
    ordered = [
        spans["first"][0],
        *spans["within the first"],
        spans["first"][1],
        *spans["all_reduce"],
    ]
    agree(group, ordered == sorted(ordered), str(spans))


@pytest.mark.mpi(min_size=2)
def test_each_message_is_one_event_with_both_ranks(group, tmp_path):
    t, own, peer = torch.ones(4, 2), group.world_ranks[group.rank], group.rank ^ 1
    takes_part = peer < group.size
    with profiled() as done:
        if takes_part and group.rank < peer:
            group.send(t, peer)
            group.recv(t)
            group.send_object("a", peer)
        elif takes_part:
            group.recv(t, peer)
            group.send(t, peer)
            group.recv_object(peer)
        if takes_part:
            for work in group.batch_isend_irecv(
                [P2POp("isend", t, peer, 1), P2POp("irecv", t.clone(), peer, 1)]
            ):
                work.wait()
    events = [e for e in trace(done, tmp_path) if not e["name"].endswith(":wait")]
    found = Counter(e["name"].removeprefix(PREFIX) for e in events)
    expected = (
        {"send": 2, "recv": 2, "send_object" if group.rank < peer else "recv_object": 1}
        if takes_part
        else {}
    )
    agree(group, found == expected, f"{found}, not {expected}")
    ends = {
        (e["name"], e["args"]["Src Rank"], e["args"]["Dst Rank"])
        for e in events
        if "Src Rank" in e["args"]
    }
    other = group.world_ranks[peer] if takes_part else None
    from_any = "any" if group.rank < peer else other
    wanted = {
        (PREFIX + "send", own, other),
        (PREFIX + "recv", other, own),
        (PREFIX + "recv", from_any, own),
    }
    agree(group, ends == (wanted if takes_part else set()), str(ends))
    shown = [
        e["args"]["Input Dims"] for e in events if e["name"] in (PREFIX + "send", PREFIX + "recv")
    ]
    agree(group, all(dims == [[4, 2]] for dims in shown), str(shown))


@mpi
@pytest.mark.parametrize("all_threads", [False, True])
def test_an_error_within_an_operation_ends_its_event(group, tmp_path, all_threads):
    def fails():
        raise OSError("on purpose")

    raised = []
    with profiled(all_threads) as done:
        for asynchronous in (False, True):
            try:
                work = group.in_order(fails, async_op=asynchronous, operation="failing")
                work.wait()
            except OSError as error:
                raised.append(str(error))
        # Refused without an event, because nothing is sent.
        for call in (
            lambda: group.send("text", 0),
            lambda: group.send(torch.ones(1), group.size),
            lambda: group.irecv([], 0),
        ):
            try:
                call()
            except (TypeError, ValueError) as error:
                raised.append(type(error).__name__)
        group.barrier()
    agree(group, raised[:2] == ["on purpose"] * 2 and len(raised) == 5, str(raised))
    events = [e for e in trace(done, tmp_path) if not e["name"].endswith(":wait")]
    agree(
        group,
        [e["name"] for e in events] == [PREFIX + n for n in ("failing", "failing", "barrier")],
        str(events),
    )
    agree(group, all(e["args"].get("finished", True) for e in events), str(events))
    ends = [e["ts"] + e["dur"] for e in events[:2]]
    agree(group, all(end <= events[2]["ts"] for end in ends), f"still open: {events}")


@mpi
@pytest.mark.parametrize("all_threads", [False, True])
def test_a_profiler_that_begins_or_ends_within_an_asynchronous_operation(group, all_threads):
    t, found = torch.ones(2), []
    for turn in range(3):
        gates = [threading.Event(), threading.Event()]
        before = group.in_order(gates[0].wait, operation="before")
        with profiled(all_threads) as done:
            gates[0].set()
            before.wait()
            within = group.all_reduce(t.fill_(turn), async_op=True)
            within.wait()
            after = group.in_order(gates[1].wait, operation="after")
            last = group.all_reduce(t, async_op=True)
        found.append(counts(done))
        # Executed by the group's thread, or within the profile by this one, which waits.
        found[-1].pop("before", None)
        # The profiler's memory is freed now, and must not be written.
        gates[1].set()
        for work in (after, last):
            work.wait()
        agree(group, t.tolist() == [turn * group.size**2] * 2, str(t))
    # A recorded thread may begin or end before or after the profiler.
    complete = None if all_threads else {"after": 1, "all_reduce": 2}
    ok = all(f == complete if complete else f.get("all_reduce", 0) >= 1 for f in found)
    agree(group, ok, str(found))


@mpi
def test_without_a_profiler_nothing_is_made(group, monkeypatch):
    def made(*args, **kwargs):
        raise AssertionError("an event without a profiler")

    monkeypatch.setattr(profiling, "_Event", made)
    group.all_reduce(torch.ones(2))
    group.all_reduce(torch.ones(2), async_op=True).wait()
    group.broadcast_object("a", 0)
    group.isend(torch.ones(1), group.rank)
    received = torch.zeros(1)
    group.recv(received, group.rank)
    agree(group, received.item() == 1.0)


def test_names_that_json_cannot_hold_and_large_groups():
    about = profiling._about_group('a"b\\c', tuple(range(100)), 3)
    assert json.loads('"' + about["Process Group Name"] + '"') == "a'b/c"
    assert about["Process Group Ranks"].endswith("28, ..., 99]") and about["Group size"] == 100
    assert profiling._dtype(torch.float8_e5m2) == "float8_e5m2"
