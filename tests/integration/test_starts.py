"""Starts of jobs as users' scripts do them: exported variables, other launchers, parts of a job."""

import socket

import pytest

from tests.tools.support import ROOT, launcher, python, python_file, short_job, started

pytestmark = pytest.mark.slow

# As a job script does: mpirun -n 2 bash -c "export RANK=...; python train.py".
_FROM_MPIRUN = ("RANK=$OMPI_COMM_WORLD_RANK", "LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK")
_TRAINS = """
    import os, torch, torch.distributed as dist
    dist.init_process_group({backend!r})
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"rank {{dist.get_rank()}} of {{total.item():.0f}} as {{os.environ['RANK']}}")
"""


@pytest.fixture
def free_port():
    """A port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def exporting(exports, script, **variables):
    """Run two ranks by mpirun, each with exported variables; return what they print."""
    line = " ".join(f"export {export};" for export in exports) + ' exec "$@"'
    shell = [*launcher(2), "bash", "-c", line, "bash"]
    return short_job(2, script, command=shell, env=variables)


@pytest.mark.parametrize(
    ("exports", "backend", "variables"),
    [
        pytest.param(_FROM_MPIRUN, "mpidist", {}, marks=pytest.mark.long),
        ((*_FROM_MPIRUN, "WORLD_SIZE=2", "MASTER_ADDR="), "mpidist", {}),
        (_FROM_MPIRUN, "nccl", {"MPIDIST_REPLACE": "nccl"}),
    ],
    ids=["RANK", "WORLD_SIZE", "replaced"],
)
def test_an_exported_rank_needs_no_address(exports, backend, variables):
    done = exporting(exports, _TRAINS.format(backend=backend), **variables)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2 as 0", "rank 1 of 2 as 1"]


@pytest.mark.parametrize(
    ("exports", "variables"),
    [
        pytest.param(("RANK=0",), {}, marks=pytest.mark.long),
        (("RANK=0",), {"MPIDIST_REPLACE": "gloo"}),
        (("RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=29531"), {}),
    ],
    ids=["RANK", "replaced", "complete"],
)
def test_a_rank_that_is_not_mpis_is_refused_with_both(exports, variables):
    done = exporting(exports, _TRAINS.format(backend="mpidist"), **variables)
    assert done.returncode != 0
    assert "RANK=0 is set, but MPI started this process as RANK=1" in done.stderr
    assert "as 0" not in done.stdout


# --- a group of some ranks of the job ---

# As torch's example of DDP with RPC does: two trainers, a master and a parameter server.
_TRAINERS_OF_FOUR = """
    import os, torch, torch.distributed as dist
    import mpidist.rpc as rpc
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    if rank <= 1:
        dist.init_process_group(
            {backend!r}, rank=rank, world_size=2, init_method="tcp://localhost:{port}"
        )
    rpc.init_rpc(f"worker{{rank}}", rank=rank, world_size=4)
    if rank <= 1:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        model(torch.full((1, 2), float(rank))).backward()
        again = dist.new_group([0, 1])
        dist.barrier(again)
        seen = rpc.rpc_sync("worker3", len, args=("four",))
        assert model.module.weight.grad.tolist() == [[0.5, 0.5]], model.module.weight.grad
        print(dist.get_world_size(), dist.get_backend(), seen)
        dist.destroy_process_group()
    rpc.shutdown()
"""


@pytest.mark.parametrize(
    ("backend", "variables"),
    [
        # That of any ranks, below, meets by tcp under this name.
        pytest.param("mpidist", {}, marks=pytest.mark.long),
        ("gloo", {"MPIDIST_REPLACE": "gloo"}),
    ],
    ids=["by_tcp", "replaced"],
)
def test_two_of_four_ranks_make_a_group(backend, variables, free_port):
    script = _TRAINERS_OF_FOUR.format(backend=backend, port=free_port)
    done = short_job(4, script, env=variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2 mpidist 4"] * 2


def test_any_ranks_that_meet_by_a_store_make_a_group(free_port):
    done = short_job(
        4,
        f"""
        import torch, torch.distributed as dist, mpidist.comm
        world = mpidist.comm.init()
        if world.rank in (1, 3):
            numbers = dict(rank=[3, 1].index(world.rank), world_size=2)
            address = "tcp://localhost:{free_port}"
            dist.init_process_group("mpidist", init_method=address, **numbers)
            got = [None, None]
            dist.all_gather_object(got, world.rank)
            print(dist.get_rank(), got)
            dist.destroy_process_group()
        dist.init_process_group("mpidist")  # and one of all ranks after it
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == 4
        """,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 [3, 1]", "1 [3, 1]"]


def test_ranks_that_cannot_be_the_first_get_the_lines_that_do_it():
    done = short_job(
        4,
        """
        import torch.distributed as dist, mpidist.comm
        world = mpidist.comm.init()
        if world.rank >= 2:
            for given in (dict(rank=world.rank - 2), dict(rank=world.rank), {}):
                try:
                    dist.init_process_group(
                        "mpidist", init_method="mpi://", world_size=2, **given
                    )
                except ValueError as error:
                    print(error)
        """,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 6
    assert all("group = dist.new_group([...])" in line and "ranks 0 to 1" in line for line in lines)


# --- processes that no MPI launcher has started ---

_SPAWNS = """
import multiprocessing, os, torch.multiprocessing as mp
from datetime import timedelta

limit = timedelta(seconds=20)

def run(rank, port):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port)
    try:
        {call}
        print("went on")
    except Exception as error:
        print(type(error).__name__, " ".join(str(error).split()))

if __name__ == "__main__":
    multiprocessing.set_executable({interpreter!r})
    mp.spawn(run, args=("{port}",), nprocs=2)
"""
_CALLS = {
    "arguments": "import torch.distributed as dist; "
    "dist.init_process_group('mpidist', rank=rank, world_size=2, timeout=limit)",
    "tcp": "import torch.distributed as dist; dist.init_process_group('mpidist', rank=rank, "
    "world_size=2, init_method=f'tcp://localhost:{port}', timeout=limit)",
    "variables": "os.environ.update(RANK=str(rank), WORLD_SIZE='2'); "
    "import torch.distributed as dist; dist.init_process_group('mpidist', timeout=limit)",
    "WORLD_SIZE": "os.environ.update(WORLD_SIZE='2'); "
    "import torch.distributed as dist; dist.init_process_group('mpidist')",
    "native": "os.environ.update(RANK=str(rank), WORLD_SIZE='2'); "
    "import mpidist.comm; mpidist.comm.init()",
    "rpc": "import mpidist.rpc; mpidist.rpc.init_rpc(f'worker{rank}', rank=rank, world_size=2)",
}
_OF_REPLACED = {
    "torchs_rpc": "import torch.distributed.rpc as rpc; "
    "rpc.init_rpc(f'worker{rank}', rank=rank, world_size=2)",
}


def spawning(folder, call, port, *start, **variables):
    """Run a program that calls something in two processes of its own; return what they print.

    They import torch no more than ranks of jobs do.
    """
    program = folder / "program.py"
    text = _SPAWNS.format(
        call=(_CALLS | _OF_REPLACED)[call], port=port, interpreter=python_file(folder)
    )
    program.write_text(text)
    done = started([*start, *python(), str(program)], 90, variables)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2, lines
    return lines


@pytest.mark.parametrize("call", _CALLS)
def test_processes_without_a_launcher_are_sent_to_mpirun(tmp_path, call, free_port):
    lines = spawning(tmp_path, call, free_port)
    # The store of the process that is refused first goes with it, and torch waits for it before.
    told = [line for line in lines if not line.startswith(("DistNetworkError", "DistStoreError"))]
    assert told, lines
    for line in told:
        assert "'mpirun -n 2 python ...'" in line and "each would train alone" in line, line
        assert "mpi://" not in line


def test_processes_that_a_rank_spawns_are_sent_to_mpirun(tmp_path, free_port):
    for line in spawning(tmp_path, "rpc", free_port, *launcher(1)):
        assert "'mpirun -n N python ...'" in line and "call run(rank) in each rank" in line, line


# --- torch's names of RPC ---

_RPC_PROGRAM = ROOT / "tests" / "integration" / "torch_rpc_program.py"


def test_a_program_on_torchs_rpc_changes_its_launcher_alone():
    command = [*launcher(2), *python(), str(_RPC_PROGRAM)]
    done = started(command, 90, {"MPIDIST_REPLACE": "gloo,rpc"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "loss 0.000000",
        "batch [3.0, 3.0]",
        "pipeline [0.0, 6.0, 12.0, 18.0]",
        "module [1, 1]",
        "mpidist.rpc.agent",
    ]


def test_torchs_example_of_ddp_with_rpc_runs_as_it_stands(free_port):
    script = f"""
        import os, torch, torch.distributed as dist, torch.distributed.autograd as dist_autograd
        import torch.distributed.rpc as rpc
        from torch.distributed.nn import RemoteModule
        from torch.distributed.optim import DistributedOptimizer
        from torch.nn.parallel import DistributedDataParallel as DDP

        rank = int(os.environ["RANK"])
        options = rpc.TensorPipeRpcBackendOptions(init_method="tcp://localhost:{free_port}")

        def train(remote, rank):
            model = DDP(torch.nn.Linear(2, 1, bias=False))
            torch.nn.init.ones_(model.module.weight)
            parameters = remote.remote_parameters()
            parameters += [rpc.RRef(parameter) for parameter in model.parameters()]
            optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=1.0)
            with dist_autograd.context() as context_id:
                loss = model(remote(torch.full((1, 2), float(rank)))).sum()
                dist_autograd.backward(context_id, [loss])
                optimizer.step(context_id)
            return model.module.weight.tolist()

        if rank < 2:
            dist.init_process_group(
                backend="gloo", rank=rank, world_size=2, init_method="tcp://localhost:1"
            )
        name = ["trainer0", "trainer1", "master", "ps"][rank]
        rpc.init_rpc(name, rank=rank, world_size=4, rpc_backend_options=options)
        if name == "master":
            remote = RemoteModule("ps", torch.nn.Identity)
            futures = [rpc.rpc_async(f"trainer{{r}}", train, args=(remote, r)) for r in (0, 1)]
            print([future.wait() for future in futures])
        rpc.shutdown()
    """
    done = short_job(4, script, env={"MPIDIST_REPLACE": "gloo,ddp,rpc"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[[[0.5, 0.5]], [[0.5, 0.5]]]"]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "set MPIDIST_REPLACE=rpc in their environment"),
        ({"MPIDIST_REPLACE": "gloo,rcp"}, "'rcp', which it does not know"),
    ],
    ids=["unset", "misspelt"],
)
def test_rpc_without_the_word_says_what_to_set(variables, words):
    script = """
        import os, torch.distributed.rpc as rpc
        rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    """
    done = short_job(2, script, env=variables)
    assert done.returncode != 0 and words in done.stderr, done.stderr


def test_torchs_rpc_in_spawned_processes_is_sent_to_mpirun(tmp_path, free_port):
    for line in spawning(tmp_path, "torchs_rpc", free_port, MPIDIST_REPLACE="rpc"):
        assert "'mpirun -n 2 python ...'" in line, line


# --- the end ---


def test_an_exception_ends_a_job_whose_framework_has_started_mpi_itself():
    # As Lightning does to find its ranks; the other rank waits for this one.
    script = """
        from mpi4py import MPI
        import torch, torch.distributed as dist
        if MPI.COMM_WORLD.Get_rank() == 1:
            raise KeyError("the culprit")
        dist.init_process_group("gloo")
    """
    done = short_job(2, script, env={"MPIDIST_REPLACE": "gloo"})
    assert done.returncode != 0
    assert "[rank 1] KeyError: 'the culprit'" in done.stderr
