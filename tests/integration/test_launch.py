"""Start and end of jobs: launchers, thread levels, forks, deaths.

Each test starts a job, or shares one.
"""

import re

import pytest

from tests.tools.support import mpich_between_nodes, printed
from tests.tools.support import short_job as run

pytestmark = pytest.mark.slow


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
        from mpidist.comm.mpi import runtime
        world = mpidist.comm.init()
        if world.rank == 1:
            def body():
                raise KeyError("the culprit")
            threading.Thread(target=runtime.guard_thread(body), name="mpidist-test").start()
            threading.Event().wait()
        world.barrier()
    """,
}


# The cases before and after it are those in which another part has to end the job.
_LONG = "before init_process_group"


@pytest.mark.parametrize(
    "when", [pytest.param(when, marks=[pytest.mark.long] * (when == _LONG)) for when in _DIES]
)
def test_an_uncaught_exception_ends_the_job(when):
    done = run(2, _DIES[when])
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert "KeyError: 'the culprit'" in done.stderr
    if when != "before MPI starts":  # then nothing of ours ran in that process
        assert "[rank 1] Traceback" in done.stderr
        assert re.search(
            r"\[rank 1\] mpidist ends the job: KeyError (uncaught|in thread 'mpidist-test')",
            done.stderr,
        )


# --- the beginning ---


_BEGIN = """
    import torch.distributed as dist
    dist.init_process_group("mpidist")
    print("went on")
"""
# Programs without a launcher, by name: (environment variables, program).
_ALONE = {
    "world of one": (
        {},
        """
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
        """,
    ),
    "backends that are not there": (
        {"CUDA_VISIBLE_DEVICES": ""},
        """
        import torch.distributed as dist
        for name in ("cuda:nccl,cpu:mpidist", "cpu:mpidist,cuda:ucc", "mpi", "mpich"):
            try:
                dist.init_process_group(name)
            except ValueError as error:
                print(error)
        import os
        os.environ["MPIDIST_REPLACE"] = "gloo"
        try:
            dist.init_process_group("gloo")
        except ValueError as error:
            print(error)
        """,
    ),
    "another launcher's MPI": ({"OMPI_COMM_WORLD_SIZE": "2"}, _BEGIN),
    "torchrun": (
        {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"},
        _BEGIN,
    ),
    "funneled": ({"MPI4PY_RC_THREAD_LEVEL": "funneled"}, _BEGIN),
    "serialized": ({"MPI4PY_RC_THREAD_LEVEL": "serialized"}, _BEGIN),
    "single": ({"MPI4PY_RC_THREAD_LEVEL": "single"}, _BEGIN),
}


def alone(name):
    """Run a program without a launcher; return its exit status, output and errors."""
    env, program = _ALONE[name]
    done = run(1, program, command=[], env=env)
    return done.returncode, done.stdout, done.stderr


def test_a_plain_process_is_a_world_of_one():
    status, output, errors = alone("world of one")
    assert status == 0, errors
    assert output.strip() == "0 1 [7.0, 7.0, 7.0] ['alone']"


def test_a_backend_that_is_not_there_says_what_to_write():
    status, output, errors = alone("backends that are not there")
    assert status == 0, errors
    no_nccl, shared, no_mpi, library, too_late = output.splitlines()
    assert "no NCCL" in no_nccl and 'Write backend="mpidist"' in no_nccl
    assert 'new_group(backend="ucc")' in shared
    assert "MPIDIST_REPLACE=mpi" in no_mpi and 'backend="mpidist"' in library
    assert "set after `import torch`" in too_late


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("another launcher's MPI", ["mpirun", "srun"]),
        ("torchrun", ["torchrun", "mpirun", "srun"]),
        ("funneled", ["MPI_THREAD_FUNNELED", "MPI4PY_RC_THREAD_LEVEL"]),
        ("serialized", ["MPI_THREAD_SERIALIZED", "MPICH_MAX_THREAD_SAFETY=multiple"]),
        pytest.param(
            "single", ["MPI_THREAD_SINGLE", "MPI4PY_RC_THREAD_LEVEL"], marks=pytest.mark.long
        ),
    ],
)
def test_a_start_that_cannot_work_says_so(name, words):
    status, output, errors = alone(name)
    assert status != 0
    assert "went on" not in output
    (line,) = [
        line
        for line in errors.splitlines()
        if "LaunchError: " in line and not line.startswith("[rank")
    ]
    assert all(word in line for word in words), line


_LOW_ON_RANK_1 = """
    import os, sys
    import mpi4py
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        mpi4py.rc.thread_level = "serialized"
    from mpi4py import MPI
    import mpidist.comm
    from mpidist.errors import DisagreementError, LaunchError
    rank = MPI.COMM_WORLD.rank
    try:
        mpidist.comm.init()
    except LaunchError as error:
        assert "MPI_THREAD_SERIALIZED on rank 1" in str(error), error
        print("refused by init", rank)
    try:
        mpidist.comm.couple({"one": 1, "two": 1})
    except LaunchError as error:
        assert rank == 1 and "MPI_THREAD_SERIALIZED" in str(error), error
        print("refused by couple", rank)
    except DisagreementError as error:
        assert rank == 0 and "refused in the processes [1]" in str(error), error
        print("refused by couple", rank)
"""


def test_one_rank_with_too_low_a_thread_level_is_an_error_of_all():
    done = run(2, _LOW_ON_RANK_1)
    assert done.returncode == 0, done.stdout + done.stderr
    said = sorted(done.stdout.splitlines())
    assert said == [f"refused by {what} {rank}" for what in ("couple", "init") for rank in (0, 1)]


_UNRECEIVED = """
    import torch
    import mpidist.comm
    group = mpidist.comm.init()
    other = 1 - group.rank
    sends = [group.isend(torch.full((400,), float(tag)), other, tag) for tag in range(200)]
    group.barrier()
    for tag in reversed(range(200)):
        got = torch.zeros(400)
        group.recv(got, other, tag)
        assert got.tolist() == [tag] * 400
    for send in sends:
        send.wait()
    print("all arrived")
"""


def test_a_collective_passes_messages_that_nobody_receives_yet():
    done = run(2, _UNRECEIVED, **mpich_between_nodes(2))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all arrived") == 2


# Two ranks with the user's own MPI code in addition to mpidist's.
_ORDINARY = """
import json, multiprocessing, time, torch, torch.distributed as dist
import mpidist.comm
early = mpidist.comm.local_rank()
{first}
mine = torch.ones(3)
work = dist.all_reduce(mine, async_op=True)
theirs = MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.Get_rank() + 1)
work.wait()
dist.all_reduce(mine)

def bad(future):
    raise KeyError("in a callback")

rank, native = dist.get_rank(), dist.group.WORLD.native
native.all_reduce(torch.ones(1), async_op=True).get_future().add_done_callback(bad)
native.all_reduce(torch.ones(1), async_op=True).get_future().then(bad)
dist.barrier()
facts = {{
    "rank": rank, "same": MPI.COMM_WORLD.Get_rank() == rank, "sum": mine.tolist(), "theirs": theirs,
    "early": early, "local_rank": mpidist.comm.local_rank(), "device": str(mpidist.comm.device()),
    "cuda": torch.cuda.device_count(),
}}
{last}
print(json.dumps(facts), flush=True)
"""
_FORKS = """
context = multiprocessing.get_context("fork")
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

facts["forked"] = {}
if rank == 0:
    for name, call in calls.items():
        here, there = context.Pipe()
        process = context.Process(target=child, args=(there, call), daemon=True)
        process.start()
        facts["forked"][name] = here.recv() if here.poll(3) else "hung"
        process.kill()
        process.join()
dist.barrier()
"""
_JOBS = {
    "theirs": {
        "first": "from mpi4py import MPI\ndist.init_process_group('mpidist')",
        "last": _FORKS
        + "dist.destroy_process_group()\nfacts['theirs after'] = MPI.COMM_WORLD.allreduce(1)",
    },
    # The group is left as it is: a user's own Finalize has to stop our threads.
    "ours": {
        "first": "dist.init_process_group('mpidist')\nfrom mpi4py import MPI",
        "last": "facts['theirs after'] = "
        "MPI.COMM_WORLD.allreduce(1)\nMPI.Finalize()\ntime.sleep(0.5)",
    },
}


@pytest.fixture(scope="module")
def ordinary():
    """Return the results of two jobs, by the MPI code that starts first."""
    return {name: run(2, _ORDINARY.format(**parts)) for name, parts in _JOBS.items()}


@pytest.mark.parametrize("first", _JOBS)
def test_one_mpi_is_shared_with_the_users_own_code(ordinary, first):
    """If mpidist starts first, a user's own ``MPI.Finalize()`` ends the job without errors."""
    done = ordinary[first]
    for rank, facts in printed(done).items():
        assert facts["same"]
        assert facts["sum"] == [4.0] * 3
        assert (facts["theirs"], facts["theirs after"]) == (3, 2)
        assert facts["early"] == facts["local_rank"] == rank
        assert facts["device"] == (f"cuda:{rank % facts['cuda']}" if facts["cuda"] else "cpu")
    assert len(printed(done)) == 2
    # A callback that raises is reported once per rank and way of adding it, and stops neither its
    # group nor the job.
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
        from mpidist.comm.mpi import library
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
        for how, workers in (("fork", 2), ("spawn", 1)):  # a spawned one imports torch again
            rows = Rows()
            rows.parent = os.getpid()
            model = DistributedDataParallel(torch.nn.Linear(3, 1))
            sampler = DistributedSampler(rows, shuffle=False)
            options = dict(num_workers=workers, multiprocessing_context=how)
            loader = DataLoader(rows, 2, sampler=sampler, **options)
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
    for facts in printed(done).values():
        # [MPI started, MPI's module imported, in the rank's own process, rows of all ranks]; a fork
        # inherits the imported module.
        assert facts["fork"] == [False, True, False, 16]
        assert facts["spawn"] == [False, False, False, 16]
    assert len(printed(done)) == 2


def test_a_forked_child_that_communicates_gets_an_error(ordinary):
    texts = printed(ordinary["theirs"])[0]["forked"]
    assert len(texts) == 9
    wrong = {
        name: text for name, text in texts.items() if "forked" not in text or "spawn" not in text
    }
    assert not wrong


# --- disagreements, compared under MPIDIST_DEBUG=1 ---

# By name: (call of rank 0, call of rank 1, text of the error on both).
_DISAGREEMENTS = {
    "operation": (
        "w.barrier()",
        "w.all_reduce(t(3))",
        ["operation: barrier on rank 0, all_reduce on rank 1"],
    ),
    "shape": ("w.all_reduce(t(3))", "w.all_reduce(t(4))", ["(3,) on rank 0", "(4,) on rank 1"]),
    "rank of the shape": (
        "w.all_reduce(t(4))",
        "w.all_reduce(t(2, 2))",
        ["(4,) on rank 0", "(2, 2) on rank 1"],
    ),
    "dtype": (
        "w.all_reduce(t(3))",
        "w.all_reduce(t(3).double())",
        ["torch.float32 on rank 0, torch.float64 on rank 1"],
    ),
    "reduction": (
        "w.all_reduce(t(3), 'sum')",
        "w.all_reduce(t(3), 'max')",
        ["sum on rank 0, max on rank 1"],
    ),
    "root": ("w.broadcast(t(3), 0)", "w.broadcast(t(3), 1)", ["src: 0 on rank 0, 1 on rank 1"]),
    "destination": ("w.reduce(t(3), 0)", "w.reduce(t(3), 1)", ["dst: 0 on rank 0, 1 on rank 1"]),
    "objects": (
        "w.broadcast_object(1, 0)",
        "w.all_gather_object(1)",
        ["broadcast_object on rank 0"],
    ),
    "asynchronous": (
        "w.all_reduce(t(3), async_op=True).wait()",
        "w.all_reduce(t(5), async_op=True).wait()",
        ["(3,) on rank 0", "(5,) on rank 1"],
    ),
    "through torch": (
        "dist.all_reduce(t(3))",
        "dist.broadcast(t(3), 0)",
        ["all_reduce on rank 0", "on rank 1"],
    ),
    "split sizes": (
        "w.all_to_all_single(t(3), t(3), [1, 2], [1, 2])",
        "w.all_to_all_single(t(2), t(2), [1, 1], [1, 1])",
        ["rank 0 sends 2", "expects 1"],
    ),
    "a root out of range on one": (
        "w.broadcast(t(3), 0)",
        "w.broadcast(t(3), 7)",
        ["src", "got 7", "rank 1"],
    ),
    "no tensor on one": (
        "w.all_reduce('three')",
        "w.all_reduce(t(3))",
        ["tensor", "got str", "rank 0"],
    ),
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
    """Errors of each rank in each case, and whether the group worked afterwards, from one job."""
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
        outcome = "nothing"
    except Exception as error:
        outcome = f"{{type(error).__name__}}: {{error}}"
    total = t(2)
    dist.all_reduce(total)
    facts[name] = [outcome, total.tolist()]
print(json.dumps(facts), flush=True)
dist.destroy_process_group()
"""
    return printed(run(2, script, env={"MPIDIST_DEBUG": "1"}))


@pytest.mark.parametrize("case", _DISAGREEMENTS)
def test_a_disagreement_raises_on_all_ranks(disagreements, case):
    words = _DISAGREEMENTS[case][2]
    for rank in (0, 1):
        text, total = disagreements[rank][case]
        assert text.startswith("DisagreementError: "), f"rank {rank}: {text}"
        assert all(word in text for word in words), f"rank {rank}: {text}"
        assert total == [2.0, 2.0], f"rank {rank}: the group is out of step afterwards"
