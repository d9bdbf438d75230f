"""Tuning tables: choice of an algorithm, caching, refusal of invalid tables, and measurement."""

import pytest
import torch

from mpidist import cache, tune
from mpidist.comm import SUM
from mpidist.comm.algorithms import device_all_reduce, device_collectives, ring, tuning
from mpidist.comm.algorithms.tuning import (
    ALGORITHMS,
    LIBRARY,
    RING,
    STAGED,
    UNMEASURED,
    Table,
    table_of,
)
from mpidist.comm.memory.fence import StreamFence
from mpidist.comm.memory.stream import HostDevice
from mpidist.comm.mpi import library
from tests.tools.simulated_nodes import lay_out
from tests.tools.support import agree

MEASURED = {1024: {STAGED: 3e-5, LIBRARY: 1e-5, RING: 2e-5}, 1 << 20: {STAGED: 9e-4, RING: 2e-4}}


def test_the_fastest_comes_first_and_what_cannot_last():
    table = table_of(MEASURED, "a test")
    assert table.rows == ((1024, (LIBRARY, RING, STAGED)), (1 << 20, (RING, STAGED, LIBRARY)))


def test_the_ring_has_the_chunks_that_were_the_fastest():
    one, four, sixteen, _ = tuning.RINGS
    measured = {
        1024: {LIBRARY: 1e-5, one: 2e-5, STAGED: 3e-5},
        64 << 20: {LIBRARY: 5e-3, one: 6e-3, four: 2e-3, sixteen: 3e-3, STAGED: 4e-3},
        256 << 20: {LIBRARY: 5e-3, STAGED: 4e-3},
    }
    table = table_of(measured, "a test")
    rankings = [(LIBRARY, RING, STAGED), (RING, STAGED, LIBRARY), (STAGED, LIBRARY, RING)]
    assert [row[1] for row in table.rows] == rankings and table.chunks == (1 << 20, 4 << 20, None)
    assert (
        table.chunk_bytes(0) == 1 << 20
        and table.chunk_bytes(100 << 20) == 4 << 20
        and table.chunk_bytes(1 << 40) is None
    )
    assert table_of(MEASURED, "a test").chunks == () and UNMEASURED.chunk_bytes(1 << 20) is None
    assert [line.split(": ")[1] for line in table.lines()] == [
        f"library, {one}, staged", f"{four}, staged, library", "staged, library, ring"
    ]  # fmt: skip
    assert [line.split(": ")[1] for line in UNMEASURED.lines()] == [
        "library, staged, ring",
        "ring, staged, library",
    ]


def test_chunks_past_a_shard_are_measured_once():
    for nbytes, size, count in [
        (0, 1, 1),
        (1 << 20, 1, 1),
        (2 << 20, 1, 2),
        (2 << 20, 2, 1),
        (64 << 20, 4, 3),
        (1 << 30, 2, 4),
    ]:
        assert list(tuning.rings_for(nbytes, size)) == list(tuning.RINGS)[:count], (
            f"{nbytes} on {size}"
        )


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
    "held",
    [
        None,
        7,
        {"rows": []},
        {"rows": [[1, ["ring"]]], "source": "x"},
        {"rows": [["a", list(ALGORITHMS)]], "source": "x"},
    ],
)
def test_invalid_tables_are_ignored(group, monkeypatch, held):
    monkeypatch.setattr(cache, "load", lambda kind, key: held)
    agree(group, tuning.agreed_table(group._comm, torch.device("cpu")) == UNMEASURED)


@pytest.mark.mpi
def test_all_ranks_use_rank_0s_table(group, monkeypatch):
    own = {
        "rows": [[group.rank + 1, [RING, STAGED, LIBRARY]]],
        "source": f"rank {group.rank}",
        "chunks": [group.rank + 5],
    }
    monkeypatch.setattr(cache, "load", lambda kind, key: own)
    table = tuning.agreed_table(group._comm, torch.device("cpu"))
    agree(group, table == Table(((1, (RING, STAGED, LIBRARY)),), "rank 0", (5,)), str(table))


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("chunks", "known"),
    [(None, ()), ([], ()), ([7, 7], ()), ([-7], ()), ([None], (None,)), ([7], (7,))],
)
def test_a_table_without_chunks_is_one(group, monkeypatch, chunks, known):
    """A table of an older version, or with invalid chunks."""
    rows = [[1, [RING, STAGED, LIBRARY]]]
    own = (
        {"rows": rows, "source": "old"}
        if chunks is None
        else {"rows": rows, "source": "old", "chunks": chunks}
    )
    monkeypatch.setattr(cache, "load", lambda kind, key: own)
    table = tuning.agreed_table(group._comm, torch.device("cpu"))
    agree(group, table.choose(1, ALGORITHMS) == RING and table.chunks == known, str(table))


@pytest.mark.mpi
def test_the_tables_chunks_reach_all_ranks(group, monkeypatch):
    used = []
    legs = ring.legs
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "1")
    monkeypatch.setattr(
        ring, "legs", lambda *args, **kwargs: (used.append(args[2]), legs(*args, **kwargs))[1]
    )
    host = torch.device("cpu")
    group._comm.tuning_tables["cpu"] = Table(
        ((400, ALGORITHMS), (40_000, (RING, STAGED, LIBRARY))), "a test", (None, 800)
    )
    fence = StreamFence(HostDevice(), ())
    for numel, chunks in [(100, ring.CHUNK_BYTES), (10_000, 800)]:
        used.clear()
        flat = torch.full((numel,), 1.0)
        call = device_all_reduce.algorithm(group._comm, torch.float32, flat.nbytes, SUM, host, RING)
        call(group._comm, fence, flat, SUM)
        target, source = (
            torch.empty(numel // group.size),
            torch.ones(numel // group.size * group.size),
        )
        device_collectives._reduce_scatter_tensor(group._comm, fence, (source,), (target,), SUM)
        agree(
            group,
            bool((flat == group.size).all() and (target == group.size).all()),
            f"{numel} elements",
        )
        agree(
            group, set(used) == ({chunks // 4} if group.size > 1 else set()), f"{used} of {chunks}"
        )


@pytest.mark.mpi
def test_a_choice_is_made_once_for_a_table(group, monkeypatch):
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "1")
    made = []
    choose = Table.choose
    monkeypatch.setattr(Table, "choose", lambda *args: (made.append(args[1]), choose(*args))[1])
    fence = StreamFence(HostDevice(), ())
    for _ in range(2):
        # A new table, as after a measurement, makes a new choice.
        group._comm.tuning_tables["cpu"] = Table(((1, (RING, STAGED, LIBRARY)),), "a test")
        for numel in (3, 3, 4, 3):
            flat = torch.ones(numel)
            device_collectives._all_reduce(group._comm, fence, (flat,), (flat,), SUM)
            agree(group, bool((flat == group.size).all()))
    agree(group, made == [12, 16] * 2, str(made))


@pytest.mark.mpi
def test_the_command_measures_on_the_cpu_and_caches_nothing(world, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "1")
    folder = world.all_gather_object(str(tmp_path))[0]
    monkeypatch.setenv("MPIDIST_CACHE", folder)
    assert tune.main(["--device", "cpu", "--sizes", "64", "100000", "--rounds", "2"]) == 0
    world.barrier()
    kept = cache.load("all-reduce", tuning.key(world._comm, torch.device("cpu")))
    agree(world, kept is None, str(kept))
    # This job uses the table.
    held = world.tuning_table(torch.device("cpu"))
    agree(world, [row[0] for row in held.rows] == [64, 100000], str(held))
    agree(world, all(sorted(row[1]) == sorted(ALGORITHMS) for row in held.rows))
    agree(world, held.chunks == (1 << 20, 1 << 20), str(held))
    agree(world, held.source.startswith("measured "))
    output = capsys.readouterr().out
    agree(
        world,
        ("not kept for later jobs" in output) == ("ring (1 MiB)" in output) == (world.rank == 0),
        output,
    )
    world._comm.tuning_tables.clear()
    world._comm.device_operations.clear()


@pytest.mark.mpi
def test_between_nodes_blocking_calls_are_measured(world, monkeypatch, tmp_path):
    """Collectives of device memory are blocking calls, so blocking calls are measured."""
    lay_out(world, monkeypatch, "alone")
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "1")
    monkeypatch.setenv("MPIDIST_CACHE", str(tmp_path / "a file"))
    (tmp_path / "a file").write_text("")
    group, lines = world.clone("far"), []
    table = group.tune(torch.device("cpu"), [4096], 1, "a test", lines.append)
    measured = lines[0].split()
    agree(world, group.size == 1 or {LIBRARY, RING, STAGED} <= set(measured), str(lines))
    agree(
        world, table.source == "a test" and (group.rank > 0 or "not kept" in lines[-1]), str(lines)
    )
    group.close()


@pytest.mark.parametrize(("where", "makes"), [("cuda", True), ("cpu", False)])
def test_mpi_is_started_as_in_the_jobs_that_use_the_table(monkeypatch, where, makes):
    def load(makes_context):
        raise InterruptedError(f"context: {makes_context}")

    monkeypatch.setattr(library, "load", load)
    with pytest.raises(InterruptedError, match=f"context: {makes}"):
        tune.main(["--device", where])


@pytest.mark.parametrize("option", [["--rounds", "0"], ["--sizes", "-4"], ["--sizes", "x"]])
def test_bad_options_are_refused_with_what_they_take(option, capsys):
    with pytest.raises(SystemExit):
        tune.main(option)
    assert f"{option[1]!r} is no whole number of at least 1" in capsys.readouterr().err


@pytest.mark.mpi
def test_without_a_gpu_the_error_says_so(world):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit) as ended:
        tune.main([])
    # One rank speaks.
    said = str(ended.value.code)
    agree(
        world,
        "needs a CUDA device" in said if world.rank == 0 else ended.value.code == 1,
        f"rank {world.rank}: {said}",
    )


def test_lines_of_measurements_fit_a_terminal_and_break_between_entries():
    entries = [f"ring ({mib} MiB) {mib}000000 us" for mib in (1, 4, 16, 64)]
    entries += ["library 1 us", "staged 2 us"]
    text = tuning.line_of(f"{1 << 26:>11} B", entries)
    assert max(map(len, text.splitlines())) <= 80 and len(text.splitlines()) > 1
    assert all(entry in text for entry in entries)
    assert tuning.line_of("8 B", ["library 1 us"]) == "8 B  library 1 us"
