"""Recordings as torch's dumps: what the installed torchfrtrace finds in those of all ranks."""

from __future__ import annotations

import argparse
import gc
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.loader import read_dir
from torch.distributed.flight_recorder.components.types import COLLECTIVES, MatchState, Op

from mpidist.comm.recorder.file_format import WORKER
from mpidist.comm.recorder.recording import Entry, Kind, Recording
from mpidist.comm.watchdog.flight_record import HAS_ANY_SOURCE
from mpidist.reports.flight_recorder import dump, write_dumps

BASE = Entry(
    1, Kind.COLLECTIVE, "all_reduce", "world", 1, "float32", (5,), 20, -1, 0, 1, 7, 9, False
)


def recording(rank, entries, overwritten=0, labels=("world",)):
    """Return the recording of a rank of three."""
    return Recording(
        path=Path("none"), version=1, job="job", rank=rank, size=3, pid=9, host="here",
        program="p", started_wall_ns=10**18, started_monotonic_ns=0,
        groups={**dict.fromkeys(labels, (0, 1, 2)), f"w{rank}": (rank,)},
        entries=[replace(one, number=at) for at, one in enumerate(entries, 1 + overwritten)],
        overwritten=overwritten, oldest=1 + overwritten,
        keys={**{label: f"key of {label}" for label in labels}, f"w{rank}": WORKER},
    )  # fmt: skip


def reduces(*sequences):
    return [replace(BASE, sequence=sequence) for sequence in sequences]


@pytest.fixture(autouse=True)
def _collecting():
    """Enable garbage collection again: torch's reader of dumps leaves it disabled."""
    yield
    gc.enable()


def analysed(folder, recordings, **options):
    """Return the collectives that torch's analyzer finds in the dumps."""
    write_dumps(recordings, folder)
    args = argparse.Namespace(
        prefix="rank_", trace_dir=str(folder), verbose=False, just_print_entries=False,
        mismatch_cap=10, **{"allow_incomplete_ranks": False, **options},
    )  # fmt: skip
    return build_db(*read_dir(args)[:1], args, "2.10").collectives


def test_equal_operations_match(tmp_path):
    step = replace(BASE, kind=Kind.STEP, operation="OSS(SGD)", group="", sequence=0)
    call = replace(BASE, kind=Kind.CALL, operation="f", group="", sequence=0, end_ns=None)
    sent = replace(BASE, kind=Kind.SEND, operation="send", sequence=0, peer=1)
    found = analysed(
        tmp_path,
        [
            recording(0, [step, *reduces(1), sent, *reduces(2)]),
            recording(1, [*reduces(1, 2), call]),
            recording(2, reduces(1, 2)),
        ],
    )
    assert [(one.collective_seq_id, one.pass_check, one.missing_ranks) for one in found] == [
        (1, True, None), (2, True, None),
    ]  # fmt: skip


def test_a_missing_rank_another_shape_and_another_operation_are_named(tmp_path):
    waits = replace(BASE, sequence=2, end_ns=None)
    waiting = [*reduces(1), waits]
    ranks = [recording(0, waiting), recording(1, reduces(1)), recording(2, waiting)]
    missing = analysed(tmp_path / "a", ranks)[-1]
    assert missing.missing_ranks == {1} and missing.collective_state == "started"
    for number, other, match in (
        (0, replace(waits, shape=(6,)), MatchState.SIZE_OR_SYNTAX_MISMATCH),
        (1, replace(waits, operation="broadcast"), MatchState.COLLECTIVE_TYPE_MISMATCH),
        (2, replace(waits, dtype="float64"), MatchState.COLLECTIVE_DTYPE_MISMATCH),
    ):
        wrong = analysed(
            tmp_path / str(number),
            [recording(rank, [*reduces(1), other if rank == 2 else waits]) for rank in range(3)],
        )[-1]
        # torch takes the rank whose file it reads first as the one that is right.
        assert not wrong.pass_check and set(wrong.mismatch_collectives) in ({2}, {0, 1})
        kinds = {one.type_of_mismatch.state for one in wrong.mismatch_collectives.values()}
        assert kinds == {match}


def test_operations_that_some_rank_no_longer_holds_are_left_out(tmp_path):
    found = analysed(
        tmp_path,
        [
            recording(0, reduces(3, 4, 5), overwritten=2),
            recording(1, reduces(1, 2, 3, 4, 5)),
            recording(2, reduces(4, 5), overwritten=7),
        ],
    )
    assert [(one.collective_seq_id, one.pass_check) for one in found] == [(4, True), (5, True)]


def test_a_message_under_way_takes_no_number_of_the_collectives(tmp_path):
    receive = replace(
        BASE, kind=Kind.RECEIVE, operation="recv", sequence=0, peer=1, tag=7, end_ns=None
    )
    from_any = replace(receive, peer=-1)
    ranks = [
        recording(0, [*reduces(1), receive, from_any, *reduces(2)]),
        *(recording(rank, reduces(1, 2)) for rank in (1, 2)),
    ]
    made = dump(ranks[0])
    messages = [one for one in made["entries"] if one["is_p2p"]]
    assert len(messages) == 1 + HAS_ANY_SOURCE
    assert messages[0]["profiling_name"].endswith(":recv 0<-1")
    assert made["pg_config"]["key of world:0,1"]["ranks"] == "[0, 1]"
    ranks[0].entries.remove(replace(from_any, number=3))
    found = analysed(tmp_path, ranks)
    assert [one.pass_check for one in found if "all_reduce" in one.collective_name] == [True] * 2
    (missing,) = [one for one in found if "recv" in one.collective_name]
    assert missing.missing_ranks == {1}


def test_dumps_of_some_ranks_are_read_where_that_is_allowed(tmp_path):
    some = [recording(rank, reduces(1)) for rank in (0, 2)]
    assert len(analysed(tmp_path, some, allow_incomplete_ranks=True)) == 1


@pytest.mark.parametrize(
    ("operation", "shape", "size_bytes", "kind", "sizes"),
    [
        ("all_reduce", (2, 3), 24, "all_reduce", ([[2, 3]], [[2, 3]])),
        ("barrier", (), 0, "all_reduce_barrier", ([[]], [[]])),
        ("broadcast", (4,), 16, "broadcast", ([[4]], [[4]])),
        ("all_gather", (4,), 48, "all_gather", ([[4]], [[12]])),
        ("all_gather", (4,), 44, "all_reduce_barrier", ([[]], [[]])),
        ("all_gather_into_tensor", (12,), 48, "_all_gather_base", ([[4]], [[12]])),
        ("gather", (4,), 16, "gather", ([[4]], [[12]])),
        ("scatter", (4,), 48, "scatter", ([[12]], [[4]])),
        ("reduce_scatter", (4,), 48, "reduce_scatter", ([[12]], [[4]])),
        ("reduce_scatter_tensor", (4,), 16, "_reduce_scatter_base", ([[12]], [[4]])),
        ("all_to_all_single", (7,), 28, "all_to_all", ([[7]], [[7]])),
    ],
)
def test_sizes_are_those_that_torchfrtrace_compares(operation, shape, size_bytes, kind, sizes):
    dtype = "float32" if size_bytes else ""
    one = replace(BASE, operation=operation, shape=shape, size_bytes=size_bytes, dtype=dtype)
    (entry,) = dump(recording(0, [one]))["entries"]
    assert entry["profiling_name"].split(":")[1] == kind and kind in COLLECTIVES
    assert (entry["input_sizes"], entry["output_sizes"]) == sizes
    op = Op(entry, {"k": {0, 1, 2}}, "k")
    assert op.match(op).state == MatchState.FULLY_MATCHED or kind == "all_to_all"


def test_a_file_has_the_state_of_the_groups_and_the_process_that_took_a_rank(tmp_path):
    labels = ("world", "tp#2")
    first = replace(recording(0, reduces(1), labels=labels), worlds=("a",))
    later = replace(
        recording(0, [*reduces(1), replace(BASE, sequence=2, end_ns=None)], labels=labels),
        started_wall_ns=2 * 10**18,
        worlds=("a", "b"),
    )
    (path,) = write_dumps([later, first], tmp_path / "new")
    assert path == tmp_path / "new" / "rank_0"
    read = pickle.loads(path.read_bytes())
    assert read["version"] == "2.10" and read["rank"] == 0
    assert read["pg_status"]["1"] == {
        "last_enqueued_collective": 2,
        "last_started_collective": 2,
        "last_completed_collective": 1,
    }
    assert read["pg_config"]["key of tp#2"]["desc"] == "tp" and len(read["pg_config"]) == 2
    entry = read["entries"][0]
    assert entry["time_created_ns"] == 2 * 10**18 + 7
    assert entry["time_discovered_completed_ns"] == 2 * 10**18 + 9
