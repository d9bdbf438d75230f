"""The table of all-reduces: pure choice, what is kept and what is refused, and measuring one."""

import pytest
import torch

from mpidist import cache, tune
from mpidist.comm import library, runtime, tuning
from mpidist.comm.tuning import ALGORITHMS, LIBRARY, RING, STAGED, UNMEASURED, Table, table_of
from tests.support import agree

MEASURED = {1024: {STAGED: 3e-5, LIBRARY: 1e-5, RING: 2e-5}, 1 << 20: {STAGED: 9e-4, RING: 2e-4}}


def test_the_fastest_comes_first_and_what_cannot_last():
    table = table_of(MEASURED, "a test")
    assert table.rows == ((1024, (LIBRARY, RING, STAGED)), (1 << 20, (RING, STAGED, LIBRARY)))


@pytest.mark.parametrize(
    ("nbytes", "able", "name"),
    [
        (0, ALGORITHMS, LIBRARY),
        (31_000, ALGORITHMS, LIBRARY),
        (33_000, ALGORITHMS, RING),
        (1 << 40, ALGORITHMS, RING),
        (1 << 30, [LIBRARY, STAGED], STAGED),
        (5, [STAGED], STAGED),
    ],
)
def test_the_nearest_size_decides_among_those_that_can(nbytes, able, name):
    assert table_of(MEASURED, "a test").choose(nbytes, able) == name


def test_every_table_has_a_choice_or_says_so():
    for nbytes in (0, 100, 1 << 20, 1 << 33):
        assert UNMEASURED.choose(nbytes, ALGORITHMS) in ALGORITHMS
        assert UNMEASURED.choose(nbytes, [STAGED]) == STAGED
    with pytest.raises(ValueError, match="able are"):
        UNMEASURED.choose(1, [])


@pytest.mark.mpi
@pytest.mark.parametrize(
    "held", [None, 7, {"rows": []}, {"rows": [[1, ["ring"]]], "source": "x"}, {"rows": [["a", list(ALGORITHMS)]], "source": "x"}]
)
def test_what_cannot_be_a_table_is_none(group, monkeypatch, held):
    monkeypatch.setattr(cache, "load", lambda kind, key: held)
    agree(group, tuning.agreed_table(group._comm, torch.device("cpu")) == UNMEASURED)


@pytest.mark.mpi
def test_all_ranks_use_rank_0s(group, monkeypatch):
    own = {"rows": [[group.rank + 1, [RING, STAGED, LIBRARY]]], "source": f"rank {group.rank}"}
    monkeypatch.setattr(cache, "load", lambda kind, key: own)
    table = tuning.agreed_table(group._comm, torch.device("cpu"))
    agree(group, table == Table(((1, (RING, STAGED, LIBRARY)),), "rank 0"), str(table))


@pytest.mark.mpi
def test_the_command_measures_and_keeps(world, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "1")
    folder = world.all_gather_object(str(tmp_path))[0]
    monkeypatch.setenv("MPIDIST_CACHE", folder)
    assert tune.main(["--device", "cpu", "--sizes", "64", "100000", "--rounds", "2"]) == 0
    world.barrier()
    held = cache.load("all-reduce", tuning.key(world._comm, torch.device("cpu")))
    agree(world, held is not None and [row[0] for row in held["rows"]] == [64, 100000], str(held))
    agree(world, all(sorted(row[1]) == sorted(ALGORITHMS) for row in held["rows"]))
    told = capsys.readouterr().out
    agree(world, ("kept for later jobs" in told) == (world.rank == 0), told)
    world._comm.tuning_tables.clear()
    world._comm.device_operations.clear()


@pytest.mark.mpi
def test_between_nodes_the_library_takes_part_as_it_will(world, monkeypatch, tmp_path):
    """Collectives of device memory are blocking calls on all ranks, so those are what is measured."""
    monkeypatch.setattr(runtime.World, "nodes_of", lambda world, ranks: tuple(range(len(ranks))))
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "1")
    monkeypatch.setenv("MPIDIST_CACHE", str(tmp_path / "a file"))
    (tmp_path / "a file").write_text("")
    group, lines = world.clone("far"), []
    table = group.tune(torch.device("cpu"), [4096], 1, "a test", lines.append)
    measured = lines[0].split()
    agree(world, group.size == 1 or {LIBRARY, RING, STAGED} <= set(measured), str(lines))
    agree(world, table.source == "a test" and (group.rank > 0 or "not kept" in lines[-1]), str(lines))
    group.close()


@pytest.mark.parametrize(("where", "makes"), [("cuda", True), ("host", False), ("cpu", False)])
def test_mpi_is_started_as_the_jobs_start_it_that_use_the_table(monkeypatch, where, makes):
    def load(makes_context):
        raise InterruptedError(f"context: {makes_context}")

    monkeypatch.setattr(library, "load", load)
    with pytest.raises(InterruptedError, match=f"context: {makes}"):
        tune.main(["--device", where])


@pytest.mark.mpi
@pytest.mark.parametrize("option", [["--rounds", "0"], ["--sizes", "-4"]])
def test_bad_options_are_refused(world, option):
    with pytest.raises(SystemExit):
        tune.main(option)


@pytest.mark.mpi
def test_without_a_gpu_it_says_so(world):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        tune.main([])
