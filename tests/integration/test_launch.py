"""How jobs start and end: launchers, thread levels, forks, deaths, hangs; each test is a job of its own."""

import json
import re
import textwrap

import pytest

from tests.support import job

pytestmark = pytest.mark.slow

_LIMIT_S = 45  # a job that hangs is ended then, and the test fails; torch's own timeouts are half an hour


def run(ranks, script, *options, **settings):
    return job(ranks, script, *options, timeout_s=_LIMIT_S, **settings)


def alone(script, **env):
    """Run a script without any launcher."""
    return run(1, script, command=[], env=env)


def told(done):
    """Return what the ranks printed as JSON, by rank."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["rank"]: line for line in lines}


# --- the end ---

_DIES = {
    "before MPI starts": """
        import os
        import torch.distributed as dist
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            raise KeyError("the culprit")
        dist.init_process_group("mpidist")
        dist.barrier()
    """,
    "before init_process_group": """
        import mpidist.comm
        world = mpidist.comm.init()
        if world.rank == 1:
            raise KeyError("the culprit")
        world.barrier()
    """,
    "after init_process_group": """
        import torch.distributed as dist
        dist.init_process_group("mpidist")
        if dist.get_rank() == 1:
            raise KeyError("the culprit")
        dist.barrier()
    """,
    "in a thread of ours": """
        import threading
        import mpidist.comm
        from mpidist.comm import runtime
        world = mpidist.comm.init()
        if world.rank == 1:
            def body():
                raise KeyError("the culprit")
            threading.Thread(target=runtime.guard_thread(body), name="mpidist-test").start()
            threading.Event().wait()
        world.barrier()
    """,
}


@pytest.mark.parametrize("when", _DIES)
def test_an_uncaught_exception_ends_the_job(when):
    done = run(2, _DIES[when])
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert "KeyError: 'the culprit'" in done.stderr
    if when != "before MPI starts":  # then nothing of ours ran in that process
        assert "[rank 1] Traceback" in done.stderr
        assert re.search(r"\[rank 1\] mpidist ends the job: KeyError (uncaught|in thread 'mpidist-test')", done.stderr)


# --- the beginning ---


def test_a_plain_process_is_a_world_of_one():
    done = alone("""
        import torch, torch.distributed as dist
        dist.init_process_group("mpidist")
        tensor = torch.full((3,), 7.0)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        gathered = [None]
        dist.all_gather_object(gathered, "alone")
        dist.barrier()
        print(dist.get_rank(), dist.get_world_size(), tensor.tolist(), gathered)
        dist.destroy_process_group()
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0 1 [7.0, 7.0, 7.0] ['alone']"


def test_a_group_cannot_be_shared_with_another_backend():
    done = alone("""
        import torch.distributed as dist
        try:
            dist.init_process_group("cpu:gloo,cuda:mpidist", init_method="mpi://")
        except ValueError as error:
            print(error)
    """)
    assert done.returncode == 0, done.stderr
    assert "cpu:gloo,cuda:mpidist" in done.stdout
    assert "another for gloo: torch.distributed.new_group" in done.stdout


_BEGIN = """
    import torch.distributed as dist
    dist.init_process_group("mpidist")
    print("went on")
"""


@pytest.mark.parametrize(
    ("env", "names"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ["mpirun", "srun"]),
        (
            {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"},
            ["torchrun", "mpirun", "srun"],
        ),
        ({"MPI4PY_RC_THREAD_LEVEL": "funneled"}, ["MPI_THREAD_FUNNELED", "MPI4PY_RC_THREAD_LEVEL"]),
        ({"MPI4PY_RC_THREAD_LEVEL": "single"}, ["MPI_THREAD_SINGLE", "MPI4PY_RC_THREAD_LEVEL"]),
    ],
    ids=["another launcher's MPI", "torchrun", "funneled", "single"],
)
def test_a_start_that_cannot_work_says_so(env, names):
    done = alone(_BEGIN, **env)
    assert done.returncode != 0
    assert "went on" not in done.stdout
    (line,) = [line for line in done.stderr.splitlines() if "LaunchError: " in line and not line.startswith("[rank")]
    assert all(name in line for name in names), line


def test_one_thread_at_a_time():
    done = run(
        2,
        """
        import json, torch, torch.distributed as dist
        from datetime import timedelta
        from mpi4py import MPI
        dist.init_process_group("mpidist")
        rank = dist.get_rank()
        tensor = torch.ones(4)
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
        dist.all_reduce(tensor)
        half = torch.ones(4, dtype=torch.bfloat16)
        dist.all_reduce(half)
        parts = [torch.zeros(rank_ + 1) for rank_ in range(2)]
        dist.all_gather(parts, torch.full((rank + 1,), float(rank)))
        swapped = torch.zeros(2)
        dist.all_to_all_single(swapped, torch.tensor([10.0 * rank, 10.0 * rank + 1]))
        got = torch.zeros(2)
        works = [dist.irecv(got, 1 - rank), dist.isend(torch.full((2,), float(rank)), 1 - rank)]
        for work in works:
            work.wait()
        objects = [None, None]
        dist.all_gather_object(objects, {"rank": rank})
        sent = ["x" * 100_000] if rank == 0 else [None]
        dist.broadcast_object_list(sent, 0)
        if rank == 0:
            dist.send_object_list(["hello"], 1)
            heard = ["hello"]
        else:
            heard = [None]
            dist.recv_object_list(heard, 0)
        dist.group.WORLD.monitored_barrier(timedelta(seconds=20))
        sub = dist.new_group([0, 1])
        dist.barrier(group=sub)
        dist.destroy_process_group()
        print(json.dumps({
            "rank": rank, "serialized": MPI.Query_thread() == MPI.THREAD_SERIALIZED, "sum": tensor.tolist(),
            "half": half.tolist(), "parts": [p.tolist() for p in parts], "swapped": swapped.tolist(), "got": got.tolist(),
            "objects": objects, "long": len(sent[0]), "heard": heard,
        }), flush=True)
        """,
        env={"MPI4PY_RC_THREAD_LEVEL": "serialized"},
    )
    for rank, facts in told(done).items():
        assert facts == {
            "rank": rank,
            "serialized": True,
            "sum": [16.0] * 4,
            "half": [2.0] * 4,
            "parts": [[0.0], [1.0, 1.0]],
            "swapped": [float(rank), 10.0 + rank],
            "got": [1.0 - rank] * 2,
            "objects": [{"rank": 0}, {"rank": 1}],
            "long": 100_000,
            "heard": ["hello"],
        }
    assert len(told(done)) == 2


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_one_mpi_is_shared_with_the_users_own_code(first):
    orders = {
        "theirs": "from mpi4py import MPI\ndist.init_process_group('mpidist')",
        "ours": "dist.init_process_group('mpidist')\nfrom mpi4py import MPI",
    }
    lines = f"""
import json, torch, torch.distributed as dist
import mpidist.comm
early = mpidist.comm.local_rank()
{orders[first]}
mine = torch.ones(3)
work = dist.all_reduce(mine, async_op=True)
theirs = MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.Get_rank() + 1)
work.wait()
dist.all_reduce(mine)

def bad(future):
    raise KeyError("in a callback")

native = dist.group.WORLD.native
native.all_reduce(torch.ones(1), async_op=True).get_future().add_done_callback(bad)
native.all_reduce(torch.ones(1), async_op=True).get_future().then(bad)
dist.barrier()
facts = {{
    "rank": dist.get_rank(), "same": MPI.COMM_WORLD.Get_rank() == dist.get_rank(), "sum": mine.tolist(), "theirs": theirs,
    "early": early, "local_rank": mpidist.comm.local_rank(), "device": str(mpidist.comm.device()),
    "cuda": torch.cuda.is_available(),
}}
dist.destroy_process_group()
facts["theirs after"] = MPI.COMM_WORLD.allreduce(1)
print(json.dumps(facts), flush=True)
"""
    done = run(2, lines)
    for rank, facts in told(done).items():
        assert facts["same"]
        assert facts["sum"] == [4.0] * 3
        assert (facts["theirs"], facts["theirs after"]) == (3, 2)
        assert facts["early"] == facts["local_rank"] == rank
        assert facts["device"] == ("cuda:" + str(rank) if facts["cuda"] else "cpu") or facts["cuda"]
    assert len(told(done)) == 2
    # A callback that raises is heard of, and neither stops its group nor the job: once a rank and way of adding it.
    assert done.stderr.count("KeyError: 'in a callback'") == 2
    assert done.stderr.count("never retrieved: KeyError('in a callback')") == 2


# --- forks ---

_ROWS = """
import os, sys
import torch

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        import mpidist
        import mpidist.comm
        from mpidist.comm import library
        flags = [library.is_started(), "mpi4py.MPI" in sys.modules, os.getpid() == self.parent]
        return torch.full((3,), float(index)), torch.tensor(flags)
"""


def test_data_loaders_start_no_mpi(tmp_path):
    (tmp_path / "rows_of_a_user.py").write_text(_ROWS)
    done = run(
        2,
        f"""
        import json, os, sys
        sys.path.insert(0, {str(tmp_path)!r})
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DataLoader, DistributedSampler
        from rows_of_a_user import Rows
        dist.init_process_group("mpidist")
        facts = {{"rank": dist.get_rank()}}
        for how in ("fork", "spawn"):
            rows = Rows()
            rows.parent = os.getpid()
            model = DistributedDataParallel(torch.nn.Linear(3, 1))
            sampler = DistributedSampler(rows, shuffle=False)
            loader = DataLoader(rows, 2, sampler=sampler, num_workers=2, multiprocessing_context=how)
            flags, seen = torch.zeros(3, dtype=torch.bool), 0
            for x, flag in loader:
                model(x).sum().backward()
                flags |= flag.any(0)
                seen += len(x)
            total = torch.tensor([seen])
            dist.all_reduce(total)
            facts[how] = [*flags.tolist(), total.item()]
        dist.destroy_process_group()
        print(json.dumps(facts), flush=True)
        """,
    )
    for facts in told(done).values():
        # [MPI started, MPI's module there, it was the rank itself, rows of all ranks]; a fork inherits the module.
        assert facts["fork"] == [False, True, False, 16]
        assert facts["spawn"] == [False, False, False, 16]
    assert len(told(done)) == 2


def test_a_forked_child_is_told_that_it_cannot_communicate():
    done = run(
        2,
        """
        import json, multiprocessing, torch, torch.distributed as dist
        dist.init_process_group("mpidist")
        rank, native = dist.get_rank(), dist.group.WORLD.native
        context = multiprocessing.get_context("fork")
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1), async_op=True).wait()
        calls = {
            "all_reduce": lambda: native.all_reduce(torch.ones(1)),
            "torch's all_reduce": lambda: dist.all_reduce(torch.ones(1)),
            "asynchronous": lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(),
            "broadcast": lambda: dist.broadcast(torch.ones(1), 0),
            "isend": lambda: dist.isend(torch.ones(1), 1),
            "all_gather_object": lambda: native.all_gather_object(1),
            "send_object": lambda: native.send_object(1, 1),
            "monitored_barrier": lambda: native.monitored_barrier(1),
            "new_group": lambda: native.new_group([0, 1]),
        }

        def child(end, call):
            try:
                call()
            except Exception as error:
                end.send(f"{type(error).__name__}: {error}")
            else:
                end.send("went through")

        facts = {"rank": rank}
        if rank == 0:
            for name, call in calls.items():
                here, there = context.Pipe()
                process = context.Process(target=child, args=(there, call), daemon=True)
                process.start()
                facts[name] = here.recv() if here.poll(3) else "hung"
                process.kill()
                process.join()
        dist.barrier()
        dist.destroy_process_group()
        print(json.dumps(facts), flush=True)
        """,
    )
    facts = told(done)[0]
    del facts["rank"]
    assert len(facts) == 9
    wrong = {name: text for name, text in facts.items() if "forked" not in text or "spawn" not in text}
    assert not wrong


# --- hangs and deaths ---


def test_a_rank_that_never_comes_is_reported_and_the_job_ends():
    done = run(
        2,
        """
        import torch, torch.distributed as dist
        from datetime import timedelta
        dist.init_process_group("mpidist", timeout=timedelta(seconds=1))
        elsewhere = dist.group.WORLD.native.clone("elsewhere")
        elsewhere.timeout_s = None
        dist.all_reduce(torch.ones(5))
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(3, 2, dtype=torch.float64))
        else:
            elsewhere.broadcast(torch.ones(7, dtype=torch.int16), 0)
        """,
    )
    assert done.returncode != 0
    report = done.stderr
    number = int(re.search(r'all_reduce number (\d+) of group "world" is past its timeout of 1 s', report)[1])
    assert re.search(rf"rank 0: in number {number} all_reduce\(shape=\(3, 2\), dtype=torch.float64\) of group", report)
    assert re.search(rf'rank 1: outside any collective of group "world"; the last was number {number - 1}, all_reduce', report)
    assert re.search(r'rank 1: in number 1 broadcast\(shape=\(7,\), dtype=torch.int16\) of group "elsewhere"', report)
    assert "no return from MPI within 2 s of the report" in report
    assert report.count("What each rank is in") == 1


_LEAVES = """
    import json, sys, time, torch
    import mpidist.comm
    from mpidist.errors import RankFailureError
    world = mpidist.comm.init()
    pair = world.new_group([0, 2])
    world.barrier()
    if world.rank == 1:
        sys.exit(3)
    for _ in range(30):  # what the rank that left is no member of goes on
        time.sleep(0.1)
        pair.barrier()
    try:
        world.all_reduce(torch.ones(3))
    except RankFailureError as error:
        print(json.dumps({"rank": world.rank, "ranks": error.ranks}), flush=True)
"""


def test_a_rank_that_ends_its_program_early_is_named():
    done = run(3, _LEAVES)
    assert done.returncode != 0
    assert 'all_reduce number 2 of group "world" waits for a rank that has left' in done.stderr
    assert "rank 1: has come to the end of its program, and never called this" in done.stderr
    assert "rank 2: in number 2 all_reduce(shape=(3,), dtype=torch.float32)" in done.stderr


_ENDS = {
    # what rank 0 does after rank 1 has come to its end: what it is told
    "recv": ("world.recv(torch.zeros(2), 1)", "recv waits for world rank 1, which came to the end of the program"),
    "recv_object": ("world.recv_object(1)", "no object came from world ranks 1, which came to the end of the program"),
    "send_object": (
        "world.send_object(torch.zeros(5_000_000), 1)",
        "send_object waits for world rank 1, which came to the end of the program",
    ),
}


@pytest.mark.parametrize("call", _ENDS)
def test_a_message_to_or_from_a_rank_that_has_ended_fails(call):
    code, text = _ENDS[call]
    done = run(
        2,
        f"""
        import torch, mpidist.comm
        from mpidist.errors import RankFailureError
        world = mpidist.comm.init()
        if world.rank == 0:
            try:
                {code}
            except RankFailureError as error:
                print(error.ranks, error, flush=True)
                import os
                os._exit(0)  # the message is still under way
        """,
    )
    assert "(1,) rank 0 of 2" in done.stdout or "(1,) no object" in done.stdout, done.stdout + done.stderr
    assert text in done.stdout


def test_groups_that_a_rank_has_closed_or_that_share_a_name_are_not_missed():
    done = run(
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
            time.sleep(4)
        tensor = torch.ones(2)
        groups[3].gather(tensor, [torch.empty(2) for _ in range(3)] if world.rank == 0 else None, 0)
        dist.gather(tensor, [torch.empty(2) for _ in range(3)] if world.rank == 0 else None, 0, group=other)
        if world.rank == 1:
            dist.destroy_process_group(other)
            del other
            gc.collect()
        print("went on", flush=True)
        """,
    )
    assert done.stdout.count("went on") == 3, done.stdout + done.stderr
    assert "has left" not in done.stderr


def test_a_group_that_a_member_does_not_make_ends_the_job_after_the_timeout():
    done = run(
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


def test_a_users_own_finalize_stops_our_threads():
    done = run(
        2,
        """
        import time, torch, torch.distributed as dist
        from mpi4py import MPI
        dist.init_process_group("mpidist")
        dist.all_reduce(torch.ones(3), async_op=True).wait()
        MPI.Finalize()
        time.sleep(1)
        print("went on", flush=True)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("went on") == 2


def test_the_store_serves_until_the_last_rank_has_ended():
    done = run(
        2,
        """
        import time, torch.distributed as dist
        dist.init_process_group("mpidist")
        if dist.get_rank() == 1:
            time.sleep(3)
            store = dist.distributed_c10d._get_default_store()
            store.set("key", "value")
            print(store.get("key"), flush=True)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert "b'value'" in done.stdout


def test_with_ulfm_the_others_outlive_a_rank_that_ends_early():
    done = run(3, _LEAVES, *_ULFM)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted((line["rank"], line["ranks"]) for line in lines) == [(0, [1]), (2, [1])], done.stdout + done.stderr


_ULFM = ("--with-ft", "ulfm")


def test_with_ulfm_a_rank_left_alone_goes_on():
    done = run(
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
        print(json.dumps({"rank": rank, "raised": raised, "again": again, "sum": tensor.tolist()}), flush=True)
        """,
        *_ULFM,
    )
    facts = told(done)
    assert "past its timeout of 1 s" in facts[0]["raised"]
    assert "rank 1: outside any collective" in facts[0]["raised"]
    assert (facts[0]["again"], facts[1]["again"]) == ("CommTimeout", "RankFailureError")  # the group is lost on both
    assert facts[0]["sum"] == facts[1]["sum"] == [3.0] * 3


def test_with_ulfm_the_survivors_learn_who_died():
    done = run(
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
        # Our threads meet the death within their next rounds; the survivors must still be there and hear each other.
        time.sleep(0.5)
        heard = torch.zeros(1)
        works = [world.isend(torch.full((1,), world.rank + 5.0), 2 - world.rank), world.irecv(heard, 2 - world.rank)]
        for work in works:
            work.wait(20)
        facts["heard"] = heard.item()
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
        assert line["heard"] == 7.0 - line["rank"]


# --- disagreements, compared under MPIDIST_DEBUG=1 ---

# name: (what rank 0 does, what rank 1 does, what both must be told)
_DISAGREEMENTS = {
    "operation": ("w.barrier()", "w.all_reduce(t(3))", ["operation: barrier on rank 0, all_reduce on rank 1"]),
    "shape": ("w.all_reduce(t(3))", "w.all_reduce(t(4))", ["(3,) on rank 0", "(4,) on rank 1"]),
    "rank of the shape": ("w.all_reduce(t(4))", "w.all_reduce(t(2, 2))", ["(4,) on rank 0", "(2, 2) on rank 1"]),
    "dtype": ("w.all_reduce(t(3))", "w.all_reduce(t(3).double())", ["torch.float32 on rank 0, torch.float64 on rank 1"]),
    "reduction": ("w.all_reduce(t(3), 'sum')", "w.all_reduce(t(3), 'max')", ["sum on rank 0, max on rank 1"]),
    "root": ("w.broadcast(t(3), 0)", "w.broadcast(t(3), 1)", ["src: 0 on rank 0, 1 on rank 1"]),
    "destination": ("w.reduce(t(3), 0)", "w.reduce(t(3), 1)", ["dst: 0 on rank 0, 1 on rank 1"]),
    "objects": ("w.broadcast_object(1, 0)", "w.all_gather_object(1)", ["broadcast_object on rank 0"]),
    "asynchronous": (
        "w.all_reduce(t(3), async_op=True).wait()",
        "w.all_reduce(t(5), async_op=True).wait()",
        ["(3,) on rank 0", "(5,) on rank 1"],
    ),
    "through torch": ("dist.all_reduce(t(3))", "dist.broadcast(t(3), 0)", ["all_reduce on rank 0", "on rank 1"]),
    "split sizes": (
        "w.all_to_all_single(t(3), t(3), [1, 2], [1, 2])",
        "w.all_to_all_single(t(2), t(2), [1, 1], [1, 1])",
        ["rank 0 sends 2", "expects 1"],
    ),
    "a root out of range on one": ("w.broadcast(t(3), 0)", "w.broadcast(t(3), 7)", ["src", "got 7", "rank 1"]),
    "no tensor on one": ("w.all_reduce('three')", "w.all_reduce(t(3))", ["tensor", "got str", "rank 0"]),
    "a short list on one": (
        "w.all_gather([t(3), t(3)], t(3))",
        "w.all_gather([t(3)], t(3))",
        ["tensor_list", "2 tensors", "rank 1"],
    ),
    "a wrong argument on one, asynchronously": (
        "w.all_reduce(t(3), async_op=True).wait()",
        "w.all_reduce(t(3), 'mean', async_op=True).wait()",
        ["mean", "rank 1"],
    ),
}


@pytest.fixture(scope="module")
def disagreements():
    """What each rank raised in each case, and whether the group worked afterwards: one job for all cases."""
    cases = {name: (zero, one) for name, (zero, one, _) in _DISAGREEMENTS.items()}
    script = f"""
import json, torch, torch.distributed as dist
dist.init_process_group("mpidist")
w, rank = dist.group.WORLD.native, dist.get_rank()
w.timeout_s = 5.0  # a disagreement that is not seen hangs, and then the watchdog ends the job
t = torch.ones
facts = {{"rank": rank}}
for name, calls in {cases!r}.items():
    try:
        eval(calls[rank])
        told = "nothing"
    except Exception as error:
        told = f"{{type(error).__name__}}: {{error}}"
    total = t(2)
    dist.all_reduce(total)
    facts[name] = [told, total.tolist()]
print(json.dumps(facts), flush=True)
dist.destroy_process_group()
"""
    return told(run(2, script, env={"MPIDIST_DEBUG": "1"}))


@pytest.mark.parametrize("case", _DISAGREEMENTS)
def test_a_disagreement_raises_on_all_ranks(disagreements, case):
    words = _DISAGREEMENTS[case][2]
    for rank in (0, 1):
        text, total = disagreements[rank][case]
        assert text.startswith("DisagreementError: "), f"rank {rank}: {text}"
        assert all(word in text for word in words), f"rank {rank}: {text}"
        assert total == [2.0, 2.0], f"rank {rank}: the group is out of step afterwards"


# --- waits that are left ---


def test_every_wait_for_a_rank_that_has_ended_raises():
    done = run(
        3,
        """
        import json, sys, torch
        import mpidist.comm, mpidist.rpc as rpc
        from mpidist.comm import group as groups
        from mpidist.errors import RankFailureError
        from mpidist.rpc import gathering
        world = mpidist.comm.init()
        rpc.init_rpc(f"w{world.rank}")
        world.barrier()
        if world.rank == 2:
            sys.exit(3)
        waits = {
            "new_group": lambda: world.new_group([0, 1, 2]),
            "monitored_barrier": world.monitored_barrier,
            "init": lambda: groups.from_world("again", 1800),
            "recv": lambda: world.recv(torch.zeros(2), 2),
            "recv_object": lambda: world.recv_object(2),
            "gathering": lambda: gathering.all_gather(None, ["w0", "w1", "w2"]),
            "shutdown": rpc.shutdown,
        }
        facts = {"rank": world.rank}
        for name, wait in waits.items():
            try:
                wait()
                facts[name] = "went through"
            except RankFailureError as error:
                facts[name] = error.ranks
        print(json.dumps(facts), flush=True)
        """,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(line.pop("rank") for line in lines) == [0, 1], done.stdout + done.stderr
    for line in lines:
        # The slower of the two may find that the other has given up as well.
        assert len(line) == 7 and all(2 in ranks for ranks in line.values()), line


# name: (what rank 1 does, what rank 0 does, does the job end well, what stdout has)
_STEP = "dist.all_reduce(torch.ones(4))"
_HANDLED = f"""
try:
    {_STEP}
except TimeoutError as error:
    print("saved", type(error).__name__, "rank 1: " in str(error), flush=True)
"""
_COMES_LATE = """
time.sleep(2.5)
try:
    dist.barrier()
except TimeoutError as error:
    print("heard", flush=True)
"""
_TIMEOUTS = {
    "handled": (_COMES_LATE, _HANDLED, True, ["saved CommTimeout True", "heard"]),
    "not handled": ("time.sleep(30)", _STEP, False, []),
    "by a process that is stopped": (
        "os.kill(os.getpid(), signal.SIGSTOP)",
        _HANDLED,
        False,
        ["saved CommTimeout True", "ended False"],
    ),
}


@pytest.mark.parametrize("case", _TIMEOUTS)
def test_a_timeout_raises_where_the_user_asks_for_it(case):
    absent, present, ends_well, texts = _TIMEOUTS[case]
    script = f"""
import os, signal, time, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("mpidist")
{_STEP}
dist.barrier()
dist.group.WORLD.set_timeout(timedelta(seconds=1))
if dist.get_rank() == 1:
{textwrap.indent(absent, "    ")}
else:
{textwrap.indent(present, "    ")}
dist.destroy_process_group()
print("ended", dist.is_initialized(), flush=True)
"""
    done = run(2, script, env={"MPIDIST_ON_TIMEOUT": "raise"})
    text = done.stdout + done.stderr
    assert (done.returncode == 0) == ends_well, text
    assert all(part in done.stdout for part in texts), text
    assert not ends_well or done.stdout.count("ended False") == 2, text
    assert done.stderr.count("What each rank is in") == 1, text


def test_with_ulfm_a_job_whose_rank_died_does_not_end_well():
    done = run(
        3,
        """
        import os, signal, torch, torch.distributed as dist
        from mpidist.errors import RankFailureError
        dist.init_process_group("mpidist")
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            for _ in range(10_000):
                dist.all_reduce(torch.ones(10))
        except RankFailureError as error:
            print("handled", error.ranks, flush=True)
        """,
        *_ULFM,
    )
    assert done.stdout.count("handled (1,)") == 2, done.stdout + done.stderr
    assert "ends this process with status 1: rank 1 of its job died" in done.stderr
    assert done.returncode != 0
