"""``MPIDIST_REPLACE``: parsing, replaced names of torch, and groups created under them."""

import json
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mpidist.c10d import names, replacement
from mpidist.c10d.replacement import Replacement, parse
from tests.tools.support import agree, raises_on_all, started


def test_the_variable_lists_backends_and_ddp():
    assert parse({}) is None and parse({"MPIDIST_REPLACE": " "}) is None
    assert parse({"MPIDIST_REPLACE": "NCCL, gloo"}) == Replacement(("gloo", "nccl"))
    assert parse({"MPIDIST_REPLACE": "ddp"}) == Replacement(ddp=True)
    assert parse({"MPIDIST_REPLACE": "rpc"}) == Replacement(rpc=True)


@pytest.mark.parametrize("text", ["gloo,ncl", "1", "all", ","])
def test_an_unknown_word_is_answered_with_the_known_ones(text):
    found = parse({"MPIDIST_REPLACE": text})
    with pytest.raises(ValueError, match="gloo, nccl, mpi, ddp and rpc"):
        found.backend("gloo")
    assert repr(text if text == "," else text.split(",")[-1]) in found.problem


def test_under_torchrun_the_error_names_the_launch_commands():
    found = parse({"MPIDIST_REPLACE": "gloo", "TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "8"})
    with pytest.raises(ValueError, match=r"mpirun -n 8 python .*srun .*unset MPIDIST_REPLACE"):
        found.backend("gloo")


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("gloo", "mpidist"),
        ("undefined", "mpidist"),
        ("fake", "fake"),
        ("cpu:gloo", "mpidist"),
        ("cpu:gloo,cuda:nccl", "cpu:mpidist,cuda:nccl"),
        ("cpu:gloo,cuda:mpidist", "mpidist"),
    ],
)
def test_only_the_listed_backends_are_replaced(named, expected):
    assert Replacement(("gloo",)).backend(named) == expected
    assert Replacement(ddp=True).backend(named) == named


def test_a_child_of_multiprocessing_is_no_rank(monkeypatch):
    monkeypatch.setenv("MPIDIST_REPLACE", "gloo")
    monkeypatch.setattr(replacement, "_patch", lambda chosen: None)
    stand_in = replacement.install()
    assert stand_in("gloo") == "mpidist"
    monkeypatch.setattr("multiprocessing.parent_process", lambda: object())
    assert stand_in("gloo") == "gloo"


@pytest.mark.slow
def test_import_torch_sets_what_frameworks_read_and_starts_nothing():
    program = """if True:
        import mpidist.ddp  # begins the import of torch, which looks for the backend
        import json, os, sys
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        facts = {name: os.environ[name] for name in names}
        facts["ours"] = DistributedDataParallel is mpidist.ddp.DistributedDataParallel
        is_listed = dist.is_backend_available("cpu:gloo,cuda:nccl")
        facts["available"] = [dist.is_nccl_available(), dist.is_mpi_available(), is_listed]
        facts["started"] = "mpi4py.MPI" in sys.modules or "cupy" in sys.modules
        print(json.dumps(facts))
    """
    ranks = {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    }
    env = {**ranks, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MPIDIST_REPLACE": "gloo,nccl,mpi,ddp"}
    done = started([sys.executable, "-c", program], 60, env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        **{
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
        },
        **{"ours": True, "available": [True, True, True], "started": False},
    }


# --- groups by torch's names ---


@pytest.fixture
def replaced(world, monkeypatch):
    """torch patched as by ``import torch`` with the variable set, without a default group."""
    monkeypatch.setenv("MPIDIST_REPLACE", "gloo,nccl,mpi")
    # Setting the current values lets monkeypatch restore them after the test.
    monkeypatch.setattr(dist.Backend, "__new__", vars(dist.Backend)["__new__"])
    for name in ("is_nccl_available", "is_mpi_available", "monitored_barrier"):
        monkeypatch.setattr(dist, name, getattr(dist, name))
    # The environment variables would stay set.
    monkeypatch.setattr(replacement, "torch_variables", lambda environ, hostname: {})
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    names.install(replacement.install())
    world.barrier()
    yield
    world.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.mpi(min_size=1)
def test_groups_by_torchs_names_are_groups_of_mpidist(world, replaced, monkeypatch):
    numbers = {"rank": world.rank, "world_size": world.size}
    # RANK without MPIDIST_REPLACE selects torch's own rendezvous.
    monkeypatch.setenv("RANK", str(world.rank))
    for arguments in (
        {},
        {"backend": "nccl", "init_method": "env://", **numbers},
        {"backend": "gloo", "init_method": "tcp://nowhere.invalid:1", **numbers},
        {"backend": "mpi"},
        {"backend": "cpu:gloo,cuda:nccl"},
    ):
        dist.init_process_group(**arguments)
        total = torch.ones(3)
        dist.all_reduce(total)
        agree(
            world,
            dist.get_backend() == "mpidist" and total[0] == world.size,
            f"{arguments}: {dist.get_backend()}",
        )
        dist.destroy_process_group()
    truth = eval(
        "dist.is_nccl_available()", {"dist": dist, "__name__": "torch.nn.parallel.distributed"}
    )
    agree(
        world,
        dist.is_nccl_available()
        and dist.is_backend_available("mpi")
        and truth == distributed_c10d.is_nccl_available(),
    )
    dist.init_process_group("gloo")
    for backend in ("gloo", "nccl", None):
        some = dist.new_group([0], backend=backend)
        is_member = some != dist.GroupMember.NON_GROUP_MEMBER
        agree(
            world,
            is_member == (world.rank == 0)
            and (not is_member or dist.get_backend(some) == "mpidist"),
            str(backend),
        )
    dist.monitored_barrier(dist.new_group(backend="gloo"))
    dist.monitored_barrier()


@pytest.mark.mpi(min_size=1)
def test_wrong_variables_and_names_are_refused_on_all_ranks(world, replaced, monkeypatch):
    wrong = {"rank": world.rank, "world_size": world.size + 1}
    # One process that is told of others was not started by MPI.
    is_alone = world.size == 1
    words = "each would train alone" if is_alone else "leave it out"
    raises_on_all(world, ValueError, lambda: dist.init_process_group("gloo", **wrong), words)
    monkeypatch.setenv("WORLD_SIZE", str(world.size + 1))
    words = "each would train alone" if is_alone else "Unset WORLD_SIZE"
    raises_on_all(world, ValueError, lambda: dist.init_process_group("gloo"), words)
    monkeypatch.delenv("WORLD_SIZE")
    raises_on_all(world, ValueError, lambda: dist.init_process_group("mpich"), 'backend="mpidist"')
    for environ in (
        {"MPIDIST_REPLACE": "glo"},
        {"MPIDIST_REPLACE": "gloo", "TORCHELASTIC_RUN_ID": "x"},
    ):
        names.install(parse(environ).backend)
        raises_on_all(world, ValueError, dist.init_process_group, "MPIDIST_REPLACE")
    agree(world, not dist.is_initialized() and not distributed_c10d._world.pg_map)
