"""Flight records: entries, files, and what torchfrtrace reads from those of all ranks."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mpidist.comm.execution.op_status import Journal
from mpidist.comm.mpi import library
from mpidist.comm.watchdog import flight_record
from tests.tools.support import printed, python, short_job, started


def group(rank=0, ranks=(0, 1), key="k", timeout_s=5.0):
    return SimpleNamespace(
        name="world",
        key=key,
        rank=rank,
        world_ranks=ranks,
        timeout_s=timeout_s,
        journal=Journal("world", key),
    )


def perform(journal, operation, inputs=(), outputs=()):
    journal.enter(operation, inputs, outputs)
    journal.leave()


@pytest.mark.parametrize(
    ("operation", "inputs", "outputs", "kind", "input_sizes", "output_sizes"),
    [
        ("all_reduce", [(2, 3)], [(2, 3)], "all_reduce", [[2, 3]], [[2, 3]]),
        ("barrier", [], [], "all_reduce_barrier", [[]], [[]]),
        # A root reads it, the others write it; torch gives every rank both.
        ("broadcast", [(4,)], [], "broadcast", [[4]], [[4]]),
        ("broadcast", [], [(4,)], "broadcast", [[4]], [[4]]),
        ("reduce", [(4,)], [], "reduce", [[4]], [[4]]),
        ("all_gather", [(4,)], [(4,), (4,)], "all_gather", [[4]], [[8]]),
        ("all_gather", [(4,)], [(4,), (5,)], "all_reduce_barrier", [[]], [[]]),
        ("all_gather_into_tensor", [(4,)], [(8,)], "_all_gather_base", [[4]], [[8]]),
        ("reduce_scatter", [(4,), (4,)], [(4,)], "reduce_scatter", [[8]], [[4]]),
        ("reduce_scatter_tensor", [(8,)], [(4,)], "_reduce_scatter_base", [[8]], [[4]]),
        ("all_to_all", [(1,), (2,)], [(3,), (4,)], "all_to_all", [[3]], [[7]]),
        ("scatter", [], [(3,)], "scatter", [[]], [[3]]),
        ("all_gather_object", [], [], "all_reduce_barrier", [[]], [[]]),
    ],
)
def test_operations_have_the_names_and_sizes_of_torchfrtrace(
    operation, inputs, outputs, kind, input_sizes, output_sizes
):
    from torch.distributed.flight_recorder.components.types import COLLECTIVES, Op

    one = group()
    perform(one.journal, operation, *([torch.zeros(s) for s in each] for each in (inputs, outputs)))
    (entry,) = flight_record.record([one])["entries"]
    assert entry["profiling_name"].split(":")[1] == kind and kind in COLLECTIVES
    assert (entry["input_sizes"], entry["output_sizes"]) == (input_sizes, output_sizes)
    assert entry["frames"][0]["name"] == f"mpidist {operation}"
    assert entry["state"] == "completed" and entry["process_group"] == ("k", "world")
    assert Op(entry, {"k": {0, 1}}, "k").type == kind


def test_only_operations_under_way_are_active():
    one = group()
    perform(one.journal, "barrier")
    one.journal.enter("all_reduce", [torch.zeros(3)], [torch.zeros(3)])
    record = flight_record.record([one], only_active=True)
    assert [(entry["collective_seq_id"], entry["state"]) for entry in record["entries"]] == [
        (2, "started")
    ]
    assert record["pg_status"] == {
        "0": {
            "last_enqueued_collective": 2,
            "last_started_collective": 2,
            "last_completed_collective": 1,
        }
    }
    assert flight_record.record([one], include_collectives=False)["entries"] == []


def test_a_wait_for_a_message_is_an_entry_of_its_two_ranks():
    one = group(rank=1, ranks=(4, 6, 9))
    one.journal.enter_wait(1, "recv", torch.zeros(5), (9,))
    one.journal.enter_wait(2, "isend", torch.zeros(2), (4,))
    with one.journal.creating("new_group"):  # no message
        record = flight_record.record([one])
    received, sent = record["entries"]
    assert received["profiling_name"].endswith(":recv 0<-1") and received["is_p2p"]
    assert sent["profiling_name"].endswith(":send 1->0")
    assert record["pg_config"]["k:6,9"]["ranks"] == "[6, 9]"
    assert record["pg_config"][sent["process_group"][0]]["ranks"] == "[4, 6]"
    assert received["output_sizes"] == [[5]] and received["state"] == "started"


def test_the_file_has_torchs_place_and_name():
    assert flight_record.path(3, {"TORCH_FR_DUMP_TEMP_FILE": "/a/b_"}) == Path("/a/b_3")
    assert flight_record.path(3, {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/c"}) == Path("/c3")
    home = {"HOME": "/home/u"}
    # Two worlds of one job; torchfrtrace finds a prefix anywhere in a name.
    named = {"TORCH_FR_DUMP_TEMP_FILE": "/a/b_"}
    assert flight_record.path(3, named, first=2) == Path("/a/b-world2_3")
    assert flight_record.path(0, home, 0).name == "comm_lib_trace_rank-world0_0"
    assert flight_record.path(0, home) == Path("/home/u/.cache/torch/comm_lib_trace_rank_0")
    # Not in /tmp, where another user may have made the folder.
    without = flight_record.path(0, {})
    assert without.is_relative_to(library.home({})) and not without.is_relative_to("/tmp")
    home["XDG_CACHE_HOME"] = "/scratch"
    assert flight_record.path(0, home) == Path("/scratch/torch/comm_lib_trace_rank_0")
    assert flight_record.is_written_on_timeout({})
    assert not flight_record.is_written_on_timeout({"TORCH_FR_DUMP_ON_TIMEOUT": "0"})
    assert not flight_record.is_written_on_timeout({"TORCH_NCCL_DUMP_ON_TIMEOUT": "false"})


def test_a_file_is_replaced_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "new" / "rank_"))
    one = group()
    for count in (1, 2):
        perform(one.journal, "barrier")
        file = flight_record.write([one], 1)
        assert len(pickle.loads(file.read_bytes())["entries"]) == count
    assert [path.name for path in file.parent.iterdir()] == ["rank_1"]


def analysed(folder):
    """Return what torchfrtrace says about the files in a folder."""
    program = ["-m", "torch.distributed.flight_recorder.fr_trace", "-p", "rank_", folder]
    done = started([*python(), *program], 100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_torchfrtrace_names_the_rank_that_is_missing(tmp_path):
    """One of three ranks leaves out an all-reduce; the files are written on the timeout."""
    done = short_job(
        3,
        """
        import time
        from datetime import timedelta
        import torch, torch.distributed as dist
        dist.init_process_group("mpidist", timeout=timedelta(seconds=3))
        x = torch.ones(5)
        for _ in range(4):
            dist.all_reduce(x)
        pair = dist.new_group([0, 1])
        gathered = torch.empty(10)
        if dist.get_rank() < 2:
            dist.all_gather_into_tensor(gathered, x, group=pair)
            dist.all_reduce(torch.ones(7))
        else:
            time.sleep(30)
        """,
        env={
            "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "rank_"),
            "TORCH_FR_DUMP_ON_TIMEOUT": "1",
        },
    )
    assert done.returncode != 0 and "torchfrtrace -p rank_" in done.stderr, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank_0", "rank_1", "rank_2"]
    said = analysed(str(tmp_path))
    assert re.search(r"Not all ranks joining collective, sequence number: \d+", said), said
    assert "missing ranks: {2}" in said and "collective: " in said and "all_reduce" in said
    assert "input sizes: [[7]]" in said and "collective state: started" in said


@pytest.mark.slow
def test_a_signal_has_a_rank_write_its_record_while_it_waits_in_mpi(tmp_path):
    """The files of a job that goes on; torchfrtrace finds no fault in them at its end."""
    found = printed(
        short_job(
            2,
            """
            import json, os, pickle, signal, time
            import torch, torch.distributed as dist
            import torch._C._distributed_c10d as c10d
            from mpidist.comm.watchdog import flight_record
            dist.init_process_group("mpidist")
            rank = dist.get_rank()
            pids = [None, None]
            dist.all_gather_object(pids, os.getpid())
            x = torch.ones(3)
            dist.all_reduce(x)
            seen = {}
            if rank == 0:
                dist.broadcast(x, 1)  # waits in MPI
            else:
                time.sleep(1)
                os.kill(pids[0], signal.SIGUSR2)
                file = flight_record.path(0, os.environ)
                while not file.exists():
                    time.sleep(0.05)
                entries = pickle.loads(file.read_bytes())["entries"]
                seen = [(e["profiling_name"].split(":")[1], e["state"]) for e in entries][-2:]
                dist.broadcast(x, 1)
            received = torch.zeros(2)
            if rank == 0:
                dist.send(received, 1)
            else:
                dist.recv(received, 0)
            mine = pickle.loads(c10d._dump_fr_trace(backend="mpidist"))
            c10d._dump_fr_trace_file(rank, backend="mpidist")
            states = sorted({entry["state"] for entry in mine["entries"]})
            others = pickle.loads(c10d._dump_fr_trace())["entries"]
            as_json = json.loads(c10d._dump_fr_trace_json(backend="mpidist"))
            print(json.dumps({
                "rank": rank, "seen": seen, "states": states, "others": len(others),
                "same": len(as_json["entries"]) == len(mine["entries"]),
            }), flush=True)
            dist.destroy_process_group()
            """,
            env={"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "rank_")},
        )
    )
    assert found[1]["seen"] == [["all_reduce", "completed"], ["broadcast", "started"]]
    assert all(one["states"] == ["completed"] and one["same"] for one in found.values())
    assert all(one["others"] == 0 for one in found.values())
    assert "Not all ranks" not in analysed(str(tmp_path))
