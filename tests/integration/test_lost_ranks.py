"""Jobs with ranks that exit early, hang or die: errors on the other ranks, and the job's end."""

import json
import re
import shutil
import textwrap

import pytest

from mpidist.comm.mpi import job_folder
from mpidist.trace import merge
from mpidist.trace.chrome_file import Reading
from tests.tools.support import short_job as run

pytestmark = pytest.mark.slow

_ULFM = ("--with-ft", "ulfm")


# A survivor that ends before the other has seen the death would be a second death for it.
_MEET = """
        def meet(folder, rank):
            os.makedirs(folder, exist_ok=True)
            open(f"{folder}/{rank}", "x").close()
            while not all(os.path.exists(f"{folder}/{each}") for each in (0, 1)):
                time.sleep(0.01)
"""


def test_every_wait_for_a_rank_that_has_ended_raises(tmp_path):
    done = run(
        3,
        _MEET
        + f"""
        import json, os, sys, time, torch
        import mpidist.comm, mpidist.rpc as rpc
        from mpidist.comm import world_group as groups
        from mpidist.errors import RankFailureError
        from mpidist.rpc import worker_gather
        world = mpidist.comm.init()
        rpc.init_rpc(f"w{{world.rank}}")
        world.barrier()
        if world.rank == 2:
            sys.exit(3)
        waits = {{
            "new_group": lambda: world.new_group([0, 1, 2]),
            "monitored_barrier": world.monitored_barrier,
            "init": lambda: groups.from_world("again", 1800),
            "recv": lambda: world.recv(torch.zeros(2), 2),
            "recv_object": lambda: world.recv_object(2),
            "gathering": lambda: worker_gather.all_gather(None, ["w0", "w1", "w2"]),
            "shutdown": rpc.shutdown,
        }}
        facts = {{"rank": world.rank}}
        for name, wait in waits.items():
            try:
                wait()
                facts[name] = "went through"
            except RankFailureError as error:
                facts[name] = error.ranks
            # One that shuts RPC down has left for the other, too.
            meet(f"{tmp_path}/{{name}}", world.rank)
        print(json.dumps(facts), flush=True)
        """,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(line.pop("rank") for line in lines) == [0, 1], done.stdout + done.stderr
    for line in lines:
        # The slower rank may see that the other rank has also timed out.
        assert len(line) == 7 and all(2 in ranks for ranks in line.values()), done.stdout


# By name: (program of rank 1, program of rank 0, whether the job succeeds, text on stdout).
_STEP = "dist.all_reduce(torch.ones(4))"
_HANDLED = f"""
try:
    {_STEP}
except TimeoutError as error:
    print("saved", type(error).__name__, "rank 1: " in str(error), flush=True)
    open(os.environ["RAISED"], "w").close()
"""
_COMES_LATE = """
while not os.path.exists(os.environ["RAISED"]):
    time.sleep(0.05)
try:
    dist.barrier()
except TimeoutError as error:
    print("raised", flush=True)
"""
_TIMEOUTS = {
    "handled": (_COMES_LATE, _HANDLED, True, ["saved CommTimeout True", "raised"]),
    "not handled": ("time.sleep(30)", _STEP, False, []),
    "by a process that is stopped": (
        "os.kill(os.getpid(), signal.SIGSTOP)",
        _HANDLED,
        False,
        ["saved CommTimeout True", "ended False"],
    ),
}


@pytest.mark.parametrize("case", _TIMEOUTS)
def test_a_timeout_raises_where_the_user_asks_for_it(case, tmp_path):
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
    raised = str(tmp_path / "raised")
    done = run(2, script, env={"MPIDIST_ON_TIMEOUT": "raise", "RAISED": raised})
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
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            for _ in range(10_000):
                dist.all_reduce(torch.ones(10))
        except RankFailureError as error:
            print("handled", error.ranks, flush=True)
        # Rank 0 has kept the table.
        for call in (lambda: store.set("a", "b"), lambda: store.wait(["b"])):
            try:
                call()
            except RankFailureError as error:
                is_named = "which world rank 0 answers" in str(error)
                print("store", 0 in error.ranks, is_named, flush=True)
        """,
        *_ULFM,
    )
    assert done.stdout.count("handled (0,)") == 2, done.stdout + done.stderr
    assert done.stdout.count("store True True") == 4, done.stdout + done.stderr
    assert "ends this process with status 1: rank 0 of its job died" in done.stderr
    assert done.returncode != 0


def test_with_ulfm_calls_to_a_dead_worker_fail_and_the_living_go_on():
    done = run(
        3,
        """
        import json, os, signal, threading, time, torch
        import mpidist.comm, mpidist.rpc as rpc
        from mpidist.errors import RankFailureError
        other_is_done, calls = threading.Event(), threading.Semaphore(0)
        def stay():
            calls.release()
            time.sleep(60)
        def note_that_other_is_done():
            other_is_done.set()
        def echo(x):
            return x
        def failure(call):
            try:
                return f"went through: {call()!r}"
            except BaseException as error:
                return [type(error).__name__, str(error)]
        world = mpidist.comm.init()
        rpc.init_rpc(f"worker{world.rank}")
        def relay(x):
            return rpc.rpc_sync("worker2", echo, args=(x,), timeout=20)
        held = []
        def hold(reference):
            held.append(reference)
        def owned():
            return rpc.current.agent.references.store.counts()
        kept = rpc.remote("worker2", torch.ones, args=(3,))
        kept.to_here()
        mine = rpc.remote("worker0", torch.ones, args=(3,)) if world.rank == 2 else None
        if world.rank == 1:
            # Of worker 0, which hears of the holder from this worker alone.
            rpc.rpc_sync("worker2", hold, args=(rpc.remote("worker0", torch.ones, args=(3,)),))
        world.barrier()
        if world.rank == 2:
            assert calls.acquire(timeout=20) and calls.acquire(timeout=20)
            os.kill(os.getpid(), signal.SIGKILL)
        waits = rpc.rpc_async("worker2", stay, timeout=0)
        facts = {"rank": world.rank, "under way": failure(waits.wait)}
        dead, large = ("worker2", echo), torch.ones(100_000)
        facts["async"] = failure(lambda: rpc.rpc_async(*dead, args=(1,), timeout=20).wait())
        facts["sync"] = failure(lambda: rpc.rpc_sync(*dead, args=(large,), timeout=20))
        remote = lambda: rpc.remote(*dead, args=(1,), timeout=20).to_here(timeout=20)
        facts["remote"] = failure(remote)
        facts["to_here"] = failure(lambda: kept.to_here(timeout=20))
        facts["method"] = failure(lambda: kept.rpc_sync(timeout=20).sum())
        other = 1 - world.rank
        facts["relay"] = failure(lambda: rpc.rpc_sync(other, relay, args=(1,), timeout=20))
        # The other worker's word of the holder that died is on its way.
        until = time.monotonic() + 20
        while any(owned()) and time.monotonic() < until:
            time.sleep(0.01)
        facts["owned"] = owned()
        facts["living"] = []
        for size in (1, 100_000):
            args = torch.full((size,), 2.0).double(), size
            for _ in range(20):
                total = rpc.rpc_sync(other, torch.add, args=args, timeout=20).sum().item()
                facts["living"].append(total)
        rref = rpc.remote(other, torch.ones, args=(4,), timeout=20)
        facts["reference"] = rref.to_here(timeout=20).tolist()
        # A shutdown that cannot be graceful returns at once, so the other worker must be done.
        rpc.rpc_async(other, note_that_other_is_done)
        assert other_is_done.wait(20)
        facts["shutdown"] = failure(lambda: rpc.shutdown(timeout=20))
        print(json.dumps(facts), flush=True)
        """,
        *_ULFM,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(line.pop("rank") for line in lines) == [0, 1], done.stdout + done.stderr
    for line in lines:
        assert (
            line.pop("living") == [3.0] * 20 + [1e5 * (2 + 1e5)] * 20
            and line.pop("reference") == [1.0] * 4
            and line.pop("owned") == [0, 0]
        )
        assert len(line) == 8
        assert re.search(
            r"\(calls: worker(0 -> worker1|1 -> worker0) -> worker2, dead\)$", line["relay"][1]
        )
        for place, (name, text) in line.items():
            assert name == "RankFailureError" and "worker2" in text, (place, name, text)


@pytest.mark.parametrize(
    ("call", "on_timeout"),
    [
        pytest.param("all_reduce(x)", "abort", marks=pytest.mark.long),
        pytest.param("all_reduce(x)", "raise", marks=pytest.mark.long),
        ("all_reduce(x, async_op=True)", "raise"),
        ("broadcast(x, k % 3)", "abort"),
    ],
)
def test_survivors_of_a_rank_that_dies_in_a_long_collective_get_its_number(
    call, on_timeout, tmp_path
):
    """MPI's own error may be of any class: MPI_ERR_IN_STATUS and MPI_ERR_OTHER were seen."""
    done = run(
        3,
        _MEET
        + f"""
        import json, os, signal, threading, time, torch
        import mpidist.comm
        from mpidist.errors import RankFailureError
        world = mpidist.comm.init()
        group = world.clone("long", on_timeout="{on_timeout}")
        x = torch.ones(4 << 20)
        if world.rank == 2:
            threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        try:
            for k in range(1 << 30):
                work = group.{call}
                if work is not None:
                    work.wait()
        except RankFailureError as error:
            print(json.dumps({{"rank": world.rank, "lost": error.ranks}}), flush=True)
            meet("{tmp_path}", world.rank)
            os._exit(0)
        """,
        *_ULFM,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    expected = [{"rank": rank, "lost": [2]} for rank in (0, 1)]
    assert sorted(found, key=lambda one: one["rank"]) == expected, done.stdout + done.stderr


def test_survivors_of_a_traced_job_write_their_parts(tmp_path):
    """Rank 0 goes on within the trace, rank 1 leaves it by the error; the program has one, too."""
    done = run(
        3,
        _MEET
        + f"""
        import os, signal, time, torch
        import mpidist.comm
        from mpidist import trace
        from mpidist.errors import RankFailureError
        world = mpidist.comm.init()
        x = torch.ones(3)
        try:
            with trace.record("{tmp_path}/block.json"):
                world.all_reduce(x)
                if world.rank == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                try:
                    world.barrier()
                except RankFailureError:
                    if world.rank == 1:
                        raise
        except RankFailureError as error:
            print("lost", error.ranks, flush=True)
        meet("{tmp_path}/lost", world.rank)
        """,
        *_ULFM,
        env={"MPIDIST_TRACE": f"{tmp_path}/program.json"},
    )
    output = done.stdout + done.stderr
    assert done.stdout.count("lost (2,)") == 2, output
    for name in ("block", "program"):
        parts = [tmp_path / f"{name}-rank{rank}.json" for rank in (0, 1)]
        assert sorted(tmp_path.glob(f"{name}*")) == parts, output
        merge(tmp_path / "all.json", parts)
        slices = [one for one in Reading(tmp_path / "all.json").events() if one["ph"] == "X"]
        ended = [one["pid"] for one in slices if one["name"].startswith("all_reduce")]
        assert sorted(ended) == [0, 1], slices


_DIES_IN_GATHER = """
        import json, os, signal, time, torch
        import mpidist.comm
        from mpidist.comm.algorithms import node_memory
        from mpidist.errors import RankFailureError
        class Deadly(list):
            def __getitem__(self, rank):
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().__getitem__(rank)
        world = mpidist.comm.init()
        def gathered(group, is_async=False):
            output = group.allocate((group.size, 1 << 18), torch.float32)
            shard = output[group.rank].fill_(group.rank + 1)
            work = group.all_gather_into_tensor(output, shard, async_op=is_async)
            if work is not None:
                work.wait()
            return output[:, -1].tolist()
"""


@pytest.mark.parametrize(
    ("on_timeout", "is_async"),
    [
        ("abort", False),
        pytest.param("abort", True, marks=pytest.mark.long),
        pytest.param("raise", False, marks=pytest.mark.long),
        ("raise", True),
    ],
)
def test_survivors_of_a_rank_that_dies_among_copies_of_node_memory_get_its_number_and_go_on(
    is_async, on_timeout, tmp_path
):
    """Rank 2 has read rank 0's shard, and the others may still read its own."""
    done = run(
        3,
        _MEET
        + _DIES_IN_GATHER
        + f"""
        group = world.clone("gathering", on_timeout="{on_timeout}")
        facts = {{"rank": world.rank, "before": gathered(group)}}
        if world.rank == 2:
            memory = node_memory.of(group._comm)
            memory._arenas = Deadly(memory._arenas)
        try:
            gathered(group, {is_async})
        except RankFailureError as error:
            facts["lost"] = error.ranks
        small = group.shrink([2])
        facts["after"] = gathered(small)
        print(json.dumps(facts), flush=True)
        meet("{tmp_path}", world.rank)
        os._exit(0)
        """,
        *_ULFM,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    facts = {"before": [1.0, 2.0, 3.0], "lost": [2], "after": [1.0, 2.0]}
    expected = [{"rank": rank, **facts} for rank in (0, 1)]
    assert sorted(found, key=lambda one: one["rank"]) == expected, done.stdout + done.stderr


def test_without_ulfm_the_job_ends_when_a_rank_dies_among_copies_of_node_memory():
    done = run(
        3,
        _DIES_IN_GATHER
        + """
        gathered(world)
        if world.rank == 2:
            memory = node_memory.of(world._comm)
            memory._arenas = Deadly(memory._arenas)
        gathered(world)
        print("went through", flush=True)
        time.sleep(60)
        """,
    )
    assert done.returncode != 0 and "went through" not in done.stdout, done.stdout + done.stderr


# By name: (what rank 2 does with the other ranks, what they do with it); 32 MiB each.
_MESSAGES = {
    "send": ("[world.irecv(y, 0), world.irecv(z, 1)]", "world.send(x, 2)"),
    "recv": ("[world.isend(y, 0), world.isend(z, 1)]", "world.recv(x, 2)"),
    "isend": ("[world.irecv(y, 0), world.irecv(z, 1)]", "world.isend(x, 2).wait()"),
    "irecv in time": ("[world.isend(y, 0), world.isend(z, 1)]", "world.irecv(x, 2).wait(30)"),
    "send_object": ("[world.recv_object(0), world.recv_object(1)]", "world.send_object(x, 2)"),
    "recv_object": ("[world.send_object(y, 0), world.send_object(z, 1)]", "world.recv_object(2)"),
    "call": ("[time.sleep(0.1)]", "rpc.rpc_sync('w2', torch.neg, (x,), timeout=30)"),
}


# Other cases wait in the same calls, and that each of them names the rank is seen at the end.
_LONG = ("send", "recv", "recv_object")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.long] * (case in _LONG)) for case in _MESSAGES],
)
def test_survivors_of_a_rank_that_dies_in_a_long_message_get_its_number_and_go_on(case, tmp_path):
    its_part, own_part = _MESSAGES[case]
    done = run(
        3,
        _MEET
        + f"""
        import json, os, signal, threading, time, torch
        import mpidist.comm, mpidist.rpc as rpc
        from mpidist.errors import RankFailureError
        world = mpidist.comm.init()
        rpc.init_rpc(f"w{{world.rank}}")
        x, y, z = (torch.ones(8 << 20) for _ in range(3))
        world.barrier()
        if world.rank == 2:
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
            while True:
                for work in {its_part}:
                    if hasattr(work, "wait"):
                        work.wait()
        try:
            while True:
                {own_part}
        except RankFailureError as error:
            lost = error.ranks
        # The living go on.
        other, a = 1 - world.rank, torch.full((4,), float(world.rank))
        b = torch.zeros(4)
        work = world.isend(a, other, 7)
        world.recv(b, other, 7)
        work.wait()
        print(json.dumps({{"rank": world.rank, "lost": lost, "got": b[0].item()}}), flush=True)
        meet("{tmp_path}", world.rank)
        rpc.shutdown(graceful=False)
        """,
        *_ULFM,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    expected = [{"rank": rank, "lost": [2], "got": 1.0 - rank} for rank in (0, 1)]
    assert sorted(found, key=lambda one: one["rank"]) == expected, done.stdout + done.stderr
    assert "after request freed" not in done.stderr


_OPERATIONS = """
        import json, os, signal, time, torch
        import mpidist.comm, mpidist.rpc as rpc
        from mpidist import autograd
        from mpidist.checkpoint import commit, load, save
        from mpidist.ddp import DistributedDataParallel
        from mpidist.optim import OSS
        def twice(x):
            return 2 * x
        def relay(x):
            return rpc.rpc_sync("w2", twice, args=(x,))
        world = mpidist.comm.init()
        rpc.init_rpc(f"w{world.rank}")
        def optimizer(**settings):
            net = torch.nn.Linear(64, 64)
            own = OSS(net.parameters(), torch.optim.Adam, world.clone("oss"), lr=0.1, **settings)
            def step():
                own.zero_grad()
                net(torch.ones(2, 64)).sum().backward()
                own.step()
            step()
            return own, step
        (_, step), (_, flat_step) = optimizer(), optimizer(partition="flat")
        consolidated, gathered = (optimizer()[0] for _ in range(2))
        module = DistributedDataParallel(torch.nn.Linear(4, 4), process_group=world.clone("ddp"))
        torch.manual_seed(0)
        state = dict(model=torch.nn.Linear(2, 2))
        groups = {name: world.clone(name) for name in ("save", "commit", "load")}
        commit(FOLDER, 1, **state, group=groups["commit"])
        other, x = 1 - world.rank, torch.ones(3, requires_grad=True)
        y = torch.zeros(3)
        facts = {"rank": world.rank}
        def lost(name, call):
            try:
                call()
                facts[name] = "went through"
            except BaseException as error:
                facts[name] = getattr(error, "ranks", repr(error))
        if world.rank == 2:
            world.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        with autograd.context() as number:
            loss = rpc.rpc_sync(other, relay, args=(x,)).sum()
            world.barrier()
            # Ends when rank 2 is dead, which may have time to answer the pass until then.
            lost("send", lambda: world.send(torch.ones(1 << 20), 2))
            lost("backward", lambda: autograd.backward(number, [loss]))
        for name, call in {
            "recv": lambda: world.recv(y, 2),
            "from any": lambda: world.irecv(y).wait(20),
            "recv_object": lambda: world.recv_object(2),
            "DDP": lambda: module(torch.ones(1, 4)).sum().backward(),
            "step": step,
            "flat step": flat_step,
            "consolidation": lambda: consolidated.consolidate_state_dict(0),
            "state_dict": lambda: gathered.state_dict(all_ranks=True),
            "save": lambda: save(FOLDER, 2, **state, group=groups["save"]),
            "commit": lambda: commit(FOLDER, 2, **state, group=groups["commit"]),
            "load": lambda: load(FOLDER, **state, group=groups["load"]),
        }.items():
            lost(name, call)
        # A survivor that has left RPC would be named by the other's pass, which may start later.
        meet(FOLDER + "/through", world.rank)
        lost("shutdown", lambda: rpc.shutdown(timeout=20))
        print(json.dumps(facts), flush=True)
        meet(FOLDER, world.rank)
        os._exit(0)
"""


def test_each_operation_names_the_rank_that_has_died(tmp_path):
    text = _MEET + _OPERATIONS.replace("FOLDER", repr(str(tmp_path)))
    done = run(3, text, *_ULFM, env={"MPIDIST_JOB": f"lost-{tmp_path.name}"})
    for folder in job_folder.MEMORY.glob(f"mpidist-*-lost-{tmp_path.name}"):
        shutil.rmtree(folder)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(line.pop("rank") for line in lines) == [0, 1], done.stdout + done.stderr
    for line in lines:
        # The other survivor may have given up its shutdown, and so have left RPC, too.
        assert 2 in line.pop("shutdown"), line
        wrong = {name: ranks for name, ranks in line.items() if ranks != [2]}
        assert len(line) == 13 and not wrong, wrong
