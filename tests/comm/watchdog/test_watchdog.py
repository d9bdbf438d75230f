"""Watchdog: late operations, its report and messages, and jobs with hangs and dead ranks."""

import json
import re
import time
from types import SimpleNamespace

import pytest

from mpidist.comm.execution.op_status import Call, History
from mpidist.comm.mpi import exited_ranks
from mpidist.comm.recorder.recorder import Off
from mpidist.comm.watchdog import watchdog, watchdog_report
from mpidist.comm.watchdog.watchdog_peers import Peers
from mpidist.errors import CommTimeout, RankFailureError
from tests.comm.watchdog.conftest import PROCESSES, Group
from tests.tools.support import printed, short_job


@pytest.fixture
def dog(monkeypatch, clock):
    """Return a watchdog of rank 0 without thread and messages, and a record of its output."""
    monkeypatch.setattr(Peers, "serve", lambda self: None)
    said = SimpleNamespace(sent=[], written=[], aborted=[])
    monkeypatch.setattr(
        Peers,
        "send",
        lambda self, ranks, kind, *content: said.sent.extend((rank, kind) for rank in ranks),
    )
    monkeypatch.setattr(watchdog.runtime, "write_stderr", said.written.append)
    monkeypatch.setattr(watchdog.runtime, "abort", said.aborted.append)
    # Another test may have had this process join a world.
    monkeypatch.setattr(watchdog.recorder, "of_process", Off)
    world = SimpleNamespace(
        watchdogs=None, size=1, rank=0, first=None, start="", processes=PROCESSES
    )
    made = watchdog.Watchdog(world)
    return made, said


def test_a_collective_in_time_is_not_reported(dog, clock):
    watching, said = dog
    group = Group((0, 1))
    watching._check(group)
    group.journal.enter("barrier")
    watching._check(group)
    clock[0] += 4.9
    watching._check(group)
    group.journal.leave()
    clock[0] += 100
    watching._check(group)
    group.timeout_s = None
    group.journal.enter("barrier")
    watching._check(group)
    clock[0] += 1e6
    watching._check(group)
    assert (said.sent, said.written, said.aborted, group.failure) == ([], [], [], None)


def test_a_late_collective_is_reported_once_then_the_job_ends(dog, clock):
    watching, said = dog
    group = Group((0, 1))
    watching.peers.groups.add(group)
    group.journal.enter("barrier")
    watching._check(group)
    clock[0] += 6
    watching._check(group)
    assert (
        said.sent == [(1, "ask"), (1, "printed")]
        and group.revoked == 1
        and isinstance(group.failure, CommTimeout)
    )
    (text,) = said.written
    assert 'barrier number 1 of group "test" is past its timeout of 5 s' in text
    assert "rank 0: in number 1 barrier()" in text and "rank 1: no answer within 1 s" in text
    assert "    process 100 on node0, main thread:" in text and "process 101 on node1" in text
    watching._check(group)
    assert len(said.written) == 1 and said.aborted == []
    clock[0] += 2.1
    watching._check(group)
    assert (
        len(said.written) == 1
        and len(said.aborted) == 1
        and 'barrier number 1 of group "test"' in said.aborted[0]
    )


def test_a_call_that_returns_does_not_end_the_job(dog, clock):
    watching, said = dog
    group = Group((0, 1))
    group.journal.enter("barrier")
    watching._check(group)
    clock[0] += 6
    watching._check(group)
    group.journal.leave()
    clock[0] += 10
    watching._check(group)
    group.journal.enter("barrier")
    watching._check(group)
    assert said.aborted == [] and len(said.written) == 1


def test_a_job_that_lingers_fails_and_ends_after_that_time_or_an_interrupt(dog, clock):
    watching, said = dog
    watching._linger_s = 600.0
    watching._signal = SimpleNamespace(interrupts=1)
    groups = [Group((0, 1), name=name) for name in ("first", "second", "third")]
    for group in groups:
        group.journal.enter("barrier")
        watching._check(group)
    clock[0] += 6
    for group in groups:
        watching._check(group)
    for text in said.written:
        assert "the job ends in 600 s (MPIDIST_LINGER)" in text
        assert "    py-spy dump --pid 101   # rank 1, on node1\n" in text
    groups[0].journal.leave()  # the other rank has come
    clock[0] += 595
    for group in groups:
        watching._check(group)
    assert len(said.written) == 3 and not any(group.failure or group.revoked for group in groups)
    watching._signal.interrupts += 1
    watching._check(groups[1])
    assert isinstance(groups[1].failure, CommTimeout) and groups[2].failure is None
    watching._signal.interrupts -= 1
    clock[0] += 6
    for group in groups:
        watching._check(group)
    assert groups[0].failure is None and isinstance(groups[2].failure, CommTimeout)
    assert len(said.aborted) == 1 and '"second"' in said.aborted[0]


def test_a_rank_that_called_another_collective_and_ended_is_missing(dog, clock):
    watching, said = dog
    group = Group((0, 1), timeout_s=1800.0)
    watching.peers.groups.add(group)
    for operation in ("barrier", "all_reduce"):
        group.journal.enter(operation)
        watching._check(group)
        clock[0] += 3
        group.journal.leave()
    group.journal.enter("all_reduce")
    watching._check(group)
    clock[0] += 3
    # The same call as here has ended on the other rank: this rank waits for its own part alone.
    watching.peers.left[1] = {group.key: History(3, (Call("barrier"), Call("all_reduce")))}
    watching._check(group)
    assert said.written == []
    watching.peers.left[1] = {group.key: History(3, (Call("barrier"), Call("broadcast")))}
    watching._check(group)
    (text,) = said.written
    lines = text.splitlines()
    assert "all_reduce number 3" in lines[0] and "waits for a rank that has left" in lines[0]
    # The call before differs, too: the first is named.
    assert lines[1] == "  rank 1 called barrier where rank 0 called all_reduce (the call before)"
    assert lines[-1] == "  rank 1: has exited; its last call was broadcast"
    assert isinstance(group.failure, RankFailureError)


def test_a_rank_that_has_ended_is_waited_for_two_seconds_only(dog, clock):
    watching, said = dog
    group = Group((0, 3), timeout_s=1800.0)
    # Rank 3 ended after its first collective of this group; a group that it had closed is not in
    # its list.
    watching.peers.left[3] = {group.key: History(1)}
    closed = Group((0, 3), timeout_s=1800.0, name="closed")
    for one in (group, closed):
        one.journal.enter("barrier")
        watching._check(one)
    clock[0] += 3
    for one in (group, closed):
        watching._check(one)
    assert said.written == [] and group.failure is None  # it took part in number 1
    group.journal.enter("all_reduce")
    watching._check(group)
    clock[0] += 3
    watching._check(group)
    assert isinstance(group.failure, RankFailureError) and tuple(group.failure.ranks) == (3,)
    assert "rank 1 (world rank 3): has exited" in said.written[0]
    assert closed.failure is None


def test_another_rank_that_is_late_prints_if_it_was_the_first_to_ask(dog, clock):
    watching, said = dog
    group = Group((0, 1))
    group.journal.enter("barrier")
    watching._check(group)
    clock[0] += 6
    # The state after a question of a watchdog with a lower rank.
    subject = (group.key, "number 1")
    watching.peers.printers[subject] = -1
    watching._check(group)
    waited = clock[0] - 1006
    # The other watchdog did not print in time.
    assert len(said.written) == 1 and waited >= watchdog._PRINTED_S
    again = Group((0, 1), name="again")
    again.journal.enter("barrier")
    watching._check(again)
    clock[0] += 6
    subject = (again.key, "number 1")
    watching.peers.printers[subject] = -1
    watching.peers.printed[subject] = clock[0]
    watching._check(again)
    assert len(said.written) == 1 and isinstance(again.failure, CommTimeout)


def test_ranks_late_in_different_calls_of_a_group_print_one_report(dog, clock):
    watching, said = dog
    group = Group((0, 1))
    other = (group.key, "number 2")
    # A report before this call has begun was another one.
    watching.peers.printed[other] = watching.peers.asked[other] = clock[0] - 1
    watching.peers.printers[other] = -1
    group.journal.enter("barrier")
    watching._check(group)
    clock[0] += 6
    watching._check(group)
    waited = clock[0] - 1006
    assert len(said.written) == 1 and waited < watchdog._COLLECT_S + watchdog._PRINTED_S
    group = Group((0, 1), name="again")
    other = (group.key, "number 2")
    group.journal.enter("barrier")
    watching._check(group)
    clock[0] += 6
    watching.peers.printed[other] = watching.peers.asked[other] = clock[0]
    watching.peers.printers[other] = -1
    watching._check(group)
    assert len(said.written) == 1 and isinstance(group.failure, CommTimeout)


# --- messages of other watchdogs ---


def report(group, answers, missing=(), left=()):
    return watchdog_report.report(
        group, "barrier number 1", "is late", answers, missing, dict(left), PROCESSES, 1.0
    ).text


def test_a_member_that_died_is_missing_after_the_grace_time(monkeypatch):
    """MPI returns from most calls by itself before that; a long one may never return."""
    group = Group((4, 0, 2))
    group.journal.enter("all_reduce")
    dog = SimpleNamespace(peers=SimpleNamespace(left={}))
    now = time.monotonic()
    monkeypatch.setattr(exited_ranks, "_dead", {2})
    monkeypatch.setattr(exited_ranks, "_exit_times", {2: now})
    assert watchdog.Watchdog._missing(dog, group) == []
    monkeypatch.setattr(exited_ranks, "_exit_times", {2: now - exited_ranks.GRACE_S - 1})
    assert watchdog.Watchdog._missing(dog, group) == [2]
    assert "rank 2: has died" in report(group, {}, [2])


# --- whole jobs ---


@pytest.mark.slow
def test_a_missing_rank_is_reported_and_the_job_ends(tmp_path):
    """An interrupt of a rank that lingers ends the job, which would linger for an hour."""
    done = short_job(
        2,
        """
        import os, signal, threading, time, torch, torch.distributed as dist
        from datetime import timedelta
        dist.init_process_group("mpidist", timeout=timedelta(seconds=1))
        elsewhere = dist.group.WORLD.native.clone("elsewhere")
        elsewhere.timeout_s = None
        pid = torch.tensor([os.getpid()])
        dist.broadcast(pid, 0)
        def interrupt():  # behind the question of rank 0's watchdog, which is about to report
            while not os.path.exists(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + "1"):
                time.sleep(0.05)
            os.kill(int(pid), signal.SIGINT)
        def load_data():
            threading.Thread(target=interrupt, daemon=True).start()
            elsewhere.broadcast(torch.ones(7, dtype=torch.int16), 0)
        dist.all_reduce(torch.ones(5))
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(3, 2, dtype=torch.float64))
        else:
            load_data()
        """,
        env={
            "MPIDIST_LINGER": "3600",
            "TORCH_FR_DUMP_ON_TIMEOUT": "1",
            "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "run_"),
        },
    )
    assert done.returncode != 0
    report = done.stderr
    # The user's third call, behind a split and those that mpidist compares the ranks with.
    number = 4
    assert f'all_reduce number {number} of group "world" is past its timeout of 1 s' in report
    assert re.search(
        rf"rank 0: in number {number} all_reduce\(shape=\(3, 2\), dtype=torch.float64\) of group",
        report,
    )
    assert re.search(
        rf'rank 1: outside any collective of group "world"; the last was number {number - 1}, '
        r"all_reduce",
        report,
    )
    assert re.search(
        r'rank 1: in number 1 broadcast\(shape=\(7,\), dtype=torch.int16\) of group "elsewhere"',
        report,
    )
    places = re.findall(r"    process (\d+) on .+, main thread: <string>:\d+(.*)", report)
    assert [place.split(",")[0] for _, place in places] == ["", " in load_data()"], report
    for rank, (pid, _) in enumerate(places):
        assert f"    py-spy dump --pid {pid}   # rank {rank}, on " in report
    assert "no return from MPI within 3602 s of the report" in report


@pytest.mark.slow
def test_a_timeout_of_one_rank_says_where_the_others_are():
    """An interrupt ends the linger of the rank with the timeout, too."""
    done = short_job(
        2,
        """
        import os, signal, sys, threading, mpidist.comm, mpidist.rpc as rpc
        world, lock = mpidist.comm.init(), threading.Lock()
        def take():
            with lock:
                pass
        def load_data(pid):
            # The watchdog of rank 0 sends that it has printed the report.
            from mpidist.comm.watchdog import watchdog
            while ("", "a timeout") not in watchdog._watchdog.peers.printed:
                threading.Event().wait(0.05)
            os.kill(pid, signal.SIGINT)
            threading.Event().wait()
        if world.rank == 1:
            lock.acquire()
        pids = world.all_gather_object(os.getpid())
        rpc.init_rpc(f"worker{world.rank}")
        if world.rank == 0:
            rpc.rpc_sync("worker1", take, timeout=1)
        else:
            load_data(pids[0])
        """,
        env={"MPIDIST_LINGER": "3600"},
    )
    assert done.returncode != 0
    told = done.stderr.partition("what the ranks are in, at the timeout of rank 0:\n")[2]
    assert re.match(
        r"  rank 1: outside any call of a group\n"
        r"    process \d+ on .+, main thread:\s+<string>:\d+ in load_data\(\)",
        told,
    ), done.stderr
    assert re.search(r"\n    mpidist-rpc-worker1-\d+: <string>:\d+ in take\(\)\n", told)
    assert re.search(r"    py-spy dump --pid \d+   # rank 1, on ", told)
    assert "CommTimeout: RPC ran for more than set timeout" in done.stderr


@pytest.mark.slow
def test_a_deadlock_of_calls_names_the_lines_of_both_handlers():
    """Both main threads time out together, and so leave the program."""
    done = short_job(
        2,
        """
        import threading, mpidist.comm, mpidist.rpc as rpc
        world, lock = mpidist.comm.init(), threading.Lock()
        def read():
            with lock:
                pass
        def update():
            with lock:
                world.barrier()
                rpc.rpc_sync(1 - world.rank, read, timeout=20)
        rpc.init_rpc(f"worker{world.rank}")
        world.barrier()
        rpc.rpc_sync(1 - world.rank, update, timeout=2)
        """,
    )
    assert done.returncode != 0
    told = done.stderr.partition("mpidist: what the ranks are in, at the timeout of rank")[2]
    for rank in (0, 1):
        for function in ("read", "update"):
            place = rf"\n    mpidist-rpc-worker{rank}-\d+: <string>:\d+ in {function}\(\)"
            assert re.search(place, told), done.stderr


@pytest.mark.slow
def test_a_rank_that_called_another_collective_is_named_though_it_has_ended():
    done = short_job(
        3,
        """
        import mpidist.comm, torch
        world = mpidist.comm.init()  # a timeout of half an hour
        world.all_reduce(torch.ones(5))
        if world.rank == 1:
            world.broadcast(torch.ones(5), 1)  # it returns on its root
        else:
            world.all_reduce(torch.ones(50_000))
        """,
    )
    assert done.returncode != 0
    assert 'all_reduce number 2 of group "world" waits for a rank that has left' in done.stderr
    assert "  rank 1 called broadcast where ranks 0, 2 called all_reduce\n" in done.stderr
    assert "  rank 1: has exited; its last call was broadcast\n" in done.stderr


_LEAVES = """
import json, sys, time, torch
import mpidist.comm
from mpidist.errors import RankFailureError
world = mpidist.comm.init()
pair = world.new_group([0, 2])
world.barrier()
if world.rank == 1:
    sys.exit(3)
for _ in range({rounds}):  # what the rank that left is no member of goes on
    time.sleep(0.1)
    pair.barrier()
texts = {{}}
for name, call in {calls!r}.items():
    try:
        eval(call)
    except RankFailureError as error:
        texts[name] = [error.ranks, str(error)]
print(json.dumps({{"rank": world.rank, "texts": texts}}), flush=True)
pair.barrier()
try:
    world.all_reduce(torch.ones(3))
except RankFailureError as error:
    print(json.dumps({{"rank": world.rank, "ranks": error.ranks}}), flush=True)
"""
_ENDS = {
    # Calls of a rank after the end of rank 1, and their errors.
    "recv": (
        "world.recv(torch.zeros(2), 1)",
        "recv waits for world rank 1, which exited",
    ),
    "recv_object": (
        "world.recv_object(1)",
        "recv_object waits for world rank 1, which exited",
    ),
    # The last one, because the message stays under way.
    "send_object": (
        "world.send_object(torch.zeros(5_000_000), 1)",
        "send_object waits for world rank 1, which exited",
    ),
}


@pytest.fixture(scope="module")
def left():
    """A job with a rank that ends early."""
    calls = {name: call for name, (call, _) in _ENDS.items()}
    return short_job(3, _LEAVES.format(calls=calls, rounds=30))


@pytest.mark.slow
def test_a_rank_that_ends_its_program_early_is_named(left):
    assert left.returncode != 0
    assert 'all_reduce number 2 of group "world" waits for a rank that has left' in left.stderr
    assert "rank 1: has exited, and never called this" in left.stderr
    assert "rank 2: in number 2 all_reduce(shape=(3,), dtype=torch.float32)" in left.stderr


@pytest.mark.slow
@pytest.mark.parametrize("call", _ENDS)
def test_a_message_to_or_from_a_rank_that_has_ended_fails(left, call):
    lines = [json.loads(line) for line in left.stdout.splitlines() if line.startswith("{")]
    texts = {line["rank"]: line["texts"] for line in lines if "texts" in line}
    assert sorted(texts) == [0, 2], left.stdout + left.stderr
    for of_rank in texts.values():
        ranks, text = of_rank[call]
        assert ranks == [1] and _ENDS[call][1] in text


@pytest.fixture(scope="module")
def late():
    """A job whose rank 2 is late for two collectives, and ends after the others."""
    return short_job(
        3,
        """
        import gc, time, torch, torch.distributed as dist
        import mpidist.comm
        world = mpidist.comm.init()
        groups = [world.split(0) for _ in range(4)]
        for _ in range(5):
            groups[0].all_reduce(torch.ones(2))
        dist.init_process_group("mpidist")
        other = dist.new_group()
        if world.rank == 2:
            time.sleep(3)  # longer than a rank that has left is waited for
        tensor = torch.ones(2)
        parts = [torch.empty(2) for _ in range(3)] if world.rank == 0 else None
        groups[3].gather(tensor, parts, 0)
        dist.gather(tensor, parts, 0, group=other)
        if world.rank == 1:
            dist.destroy_process_group(other)
            del other
            gc.collect()
        print("went on", flush=True)
        if world.rank == 2:
            time.sleep(2)
            store = dist.distributed_c10d._get_default_store()
            store.set("key", "value")
            print(store.get("key"), flush=True)
        """,
    )


@pytest.mark.slow
def test_groups_that_a_rank_has_closed_or_that_share_a_name_are_not_reported(late):
    assert late.stdout.count("went on") == 3, late.stdout + late.stderr
    assert "has left" not in late.stderr


@pytest.mark.slow
def test_the_store_serves_until_the_last_rank_has_ended(late):
    assert late.returncode == 0, late.stderr
    assert "b'value'" in late.stdout


@pytest.mark.slow
def test_a_group_that_a_member_does_not_make_ends_the_job_after_the_timeout():
    done = short_job(
        2,
        """
        import time, mpidist.comm
        world = mpidist.comm.init(timeout=1)
        if world.rank == 0:
            world.new_group([0, 1])
        time.sleep(30)
        """,
    )
    assert done.returncode != 0
    assert 'new_group of group "world" is past its timeout of 1 s' in done.stderr


@pytest.mark.slow
def test_with_ulfm_the_others_continue_after_a_rank_ends_early():
    done = short_job(3, _LEAVES.format(calls={}, rounds=1), *_ULFM)
    lines = [
        json.loads(line)
        for line in done.stdout.splitlines()
        if line.startswith("{") and "ranks" in line
    ]
    assert sorted(line["rank"] for line in lines) == [0, 2], done.stdout + done.stderr
    # The other rank may have ended before the slower one raises.
    assert all(1 in line["ranks"] for line in lines), done.stdout


_ULFM = ("--with-ft", "ulfm")


@pytest.mark.slow
def test_with_ulfm_the_last_rank_continues():
    done = short_job(
        2,
        """
        import json, torch, torch.distributed as dist
        from datetime import timedelta
        from mpidist.errors import CommTimeout, MpidistError
        dist.init_process_group("mpidist", timeout=timedelta(seconds=1))
        other = dist.new_group(timeout=timedelta(seconds=40))
        rank, raised = dist.get_rank(), None
        if rank == 0:
            try:
                dist.all_reduce(torch.ones(3))
            except CommTimeout as error:
                raised = str(error)
            dist.send(torch.ones(1), 1, group=other)
        else:
            dist.recv(torch.ones(1), 0, group=other)
        try:
            dist.all_reduce(torch.ones(3))
            again = None
        except MpidistError as error:
            again = type(error).__name__
        tensor = torch.full((3,), rank + 1.0)
        dist.all_reduce(tensor, group=other)
        facts = {"rank": rank, "raised": raised, "again": again, "sum": tensor.tolist()}
        print(json.dumps(facts), flush=True)
        """,
        *_ULFM,
    )
    facts = printed(done)
    assert "past its timeout of 1 s" in facts[0]["raised"]
    assert "rank 1: outside any collective" in facts[0]["raised"]
    # The group has failed on both.
    assert (facts[0]["again"], facts[1]["again"]) == ("CommTimeout", "RankFailureError")
    assert facts[0]["sum"] == facts[1]["sum"] == [3.0] * 3


@pytest.mark.slow
def test_with_ulfm_the_error_names_the_dead_rank():
    done = short_job(
        3,
        """
        import json, os, signal, time, torch
        import mpidist.comm
        from mpidist.errors import RankFailureError
        world = mpidist.comm.init()
        turned = world.new_group([2, 0, 1])  # the dead rank is number 2 here, 1 in the world
        turned.barrier()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            for _ in range(1000):
                turned.all_reduce(torch.ones(10))
        except RankFailureError as error:
            facts = {"rank": world.rank, "ranks": error.ranks, "text": str(error)}
        # Our threads call MPI meanwhile; the surviving ranks must still exchange messages.
        time.sleep(0.5)
        received = torch.zeros(1)
        sent = torch.full((1,), world.rank + 5.0)
        works = [world.isend(sent, 2 - world.rank), world.irecv(received, 2 - world.rank)]
        for work in works:
            work.wait(20)
        facts["received"] = received.item()
        print(json.dumps(facts), flush=True)
        os._exit(0)  # MPI's own end waits for the dead
        """,
        *_ULFM,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(line["rank"] for line in lines) == [0, 2], done.stdout + done.stderr
    for line in lines:
        assert line["ranks"] == [1]
        assert "all_reduce" in line["text"]
        assert line["received"] == 7.0 - line["rank"]
