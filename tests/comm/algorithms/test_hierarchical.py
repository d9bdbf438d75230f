"""Hierarchical all-reduce, compared with the flat one; ranks count as being on several nodes."""

import pytest
import torch

from mpidist import cache, tune
from mpidist.comm import AVG, MAX, PRODUCT, SUM
from mpidist.comm.algorithms import hierarchical, reduce_op, tuning
from mpidist.comm.algorithms.tuning import HOST_ALGORITHMS, LEVELS, LIBRARY, Table
from tests.tools.simulated_nodes import SEVERAL, groups, lay_out
from tests.tools.support import agree, finished, reduced

pytestmark = pytest.mark.mpi(min_size=3)


@pytest.fixture
def on_nodes(world, monkeypatch):
    """Return a function that makes groups whose table selects the hierarchical algorithm."""
    monkeypatch.setattr(hierarchical, "FROM_BYTES", 1)
    monkeypatch.setattr(hierarchical, "PIECE_BYTES", 1024)
    monkeypatch.setattr(
        cache, "load", lambda kind, key: {"rows": [[64, [LEVELS, LIBRARY]]], "source": "a test"}
    )
    with groups(world, monkeypatch) as clone:

        def make(layout, shares=True):
            if not shares:
                monkeypatch.setattr(hierarchical, "shared_maps", lambda comm, nbytes: None)
            return clone(layout)

        yield make


@pytest.mark.parametrize("layout", SEVERAL)
@pytest.mark.parametrize("shares", [True, False], ids=["memory", "messages"])
def test_values_are_those_of_a_flat_all_reduce(world, on_nodes, layout, shares):
    group = on_nodes(layout, shares)
    wrong = []
    for dtype in (
        torch.float32,
        torch.float64,
        torch.int32,
        torch.uint16,
        torch.bfloat16,
        torch.complex64,
        torch.bool,
    ):
        for op in (SUM, AVG, PRODUCT, MAX, "bor"):
            if (dtype is torch.bool and op == AVG) or (dtype.is_complex and op == MAX):
                continue
            if op == "bor" and (dtype.is_floating_point or dtype.is_complex):
                continue
            for numel in (1, 257, 1500):
                parts = [
                    (torch.arange(numel) % 5 + rank % 2).to(dtype) for rank in range(group.size)
                ]
                for asynchronous in (False, True):
                    tensor = parts[group.rank].clone()
                    finished(group.all_reduce(tensor, op, async_op=asynchronous))
                    expected = reduced(parts, op)
                    is_right = (
                        torch.allclose(tensor, expected)
                        if dtype.is_complex
                        else torch.equal(tensor, expected)
                    )
                    if not is_right:
                        wrong.append((dtype, op, numel, asynchronous))
    agree(world, not wrong, str(wrong[:4]))
    agree(world, bool(group._comm.children()), "it was not done by levels")


@pytest.mark.parametrize("shares", [True, False], ids=["memory", "messages"])
def test_integers_wrap_around(world, on_nodes, shares):
    group = on_nodes("blocks", shares)
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.uint16):
        limits = torch.iinfo(dtype)
        for value in (limits.min, limits.max):
            tensor = torch.full((1500,), value, dtype=dtype)
            group.all_reduce(tensor)
            expected = torch.tensor(value * group.size).to(dtype)
            agree(world, bool((tensor == expected).all()), f"{dtype} {value} {tensor[:3]}")


def test_same_bits_on_all_ranks_in_either_thread(world, on_nodes):
    group = on_nodes("cyclic")
    results = []
    for asynchronous in (False, True):
        tensor = torch.randn(5000, generator=torch.Generator().manual_seed(group.rank)) / 3
        # A synchronous call on one rank matches an asynchronous one on another.
        finished(group.all_reduce(tensor, AVG, async_op=asynchronous != (group.rank == 1)))
        results += world.all_gather_object(tensor.numpy().tobytes())
    agree(world, len(set(results)) == 1)


def test_a_group_knows_its_own_nodes(world, monkeypatch):
    lay_out(world, monkeypatch, "uneven")
    far = world.clone("far")
    near = far.new_group(range(1, world.size))
    alone = far.split_by_node()
    agree(world, not far.is_single_node and (near is None or near.is_single_node))
    agree(world, alone.is_single_node and alone.size == (1 if world.rank == 0 else world.size - 1))
    for group in (near, alone, far):
        if group is not None:
            group.close()


def test_without_a_table_the_library_decides(world, monkeypatch, tmp_path):
    """The command measures and caches a table, which later groups use."""
    folder = world.all_gather_object(str(tmp_path))[0]
    monkeypatch.setenv("MPIDIST_CACHE", folder)
    lay_out(world, monkeypatch, "blocks")
    before = world.clone("before")
    agree(world, not hierarchical.is_chosen(before._comm, 1 << 20))
    monkeypatch.setattr(tune.comm, "init", lambda: before)
    assert tune.main(["--device", "host", "--sizes", "70000", "--rounds", "1"]) == 0
    world.barrier()
    after = world.clone("after")
    held = after._comm.tuning_tables[tuning.HOST]
    agree(
        world,
        sorted(held.rows[0][1]) == sorted(HOST_ALGORITHMS) and held.source.startswith("measured"),
        str(held),
    )
    agree(world, hierarchical.is_chosen(after._comm, 70_000) == (held.rows[0][1][0] == LEVELS))
    agree(world, not hierarchical.is_chosen(after._comm, 100))
    for group in (before, after):
        group.close()


def test_the_command_refuses_the_host_on_one_node(world):
    with pytest.raises(SystemExit) as ended:
        tune.main(["--device", "host"])
    said = str(ended.value.code)
    agree(world, "several nodes" in said if world.rank == 0 else ended.value.code == 1, said)
    assert isinstance(tuning.UNMEASURED_HOST, Table)


def test_a_communicator_of_blocking_calls_has_levels(world, on_nodes):
    """Device tensors that are staged through the host are reduced by blocking calls."""
    group = on_nodes("blocks")
    tensor = torch.full((1000,), float(group.rank))
    total = group.size * (group.size - 1) / 2
    wrong = []
    for comm in (group._comm.blocking(), group._comm):
        mine = tensor.clone()
        plan = reduce_op.reduction(mine.dtype, SUM)
        hierarchical.all_reduce(comm, mine, plan)
        wrong += [] if torch.equal(mine, torch.full((1000,), total)) else [type(comm.mpi)]
    agree(group, not wrong, str(wrong))
