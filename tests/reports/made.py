"""Recordings that tests make."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mpidist.comm.recorder.file_format import WORKER
from mpidist.comm.recorder.recording import Entry, Kind, Recording
from mpidist.reports.job import RUNS, Job

WORLD = "world"
S = 10**9
WALL_NS = 1_700_000_000 * S


def entry(number: int, kind: Kind, operation: str, begin_s: float, **fields: Any) -> Entry:
    """Return an entry, under way unless ``end_s`` is given."""
    end_s = fields.pop("end_s", None)
    values = dict(
        group="", sequence=0, dtype="", shape=(), size_bytes=0, peer=-1, tag=0, thread=1,
        failed=False,
    )  # fmt: skip
    return Entry(
        number=number,
        kind=kind,
        operation=operation,
        begin_ns=int(begin_s * S),
        end_ns=None if end_s is None else int(end_s * S),
        **(values | fields),
    )


def collective(
    sequence: int, begin_s: float, end_s: float | None = None, operation: str = "all_reduce",
    shape: tuple[int, ...] = (5,), group: str = WORLD, **fields: Any,
) -> Entry:  # fmt: skip
    values = dict(sequence=sequence, end_s=end_s, shape=shape, group=group, dtype="float32")
    return entry(sequence, Kind.COLLECTIVE, operation, begin_s, **(values | fields))


def recording(rank: int, entries: list[Entry], size: int = 3, **fields: Any) -> Recording:
    """Return the recording of a rank; all groups' name is ``world``."""
    values: dict[str, Any] = dict(
        path=Path(f"/dev/shm/mpidist-0-made/recorder-{rank}"), version=1, job="made", rank=rank,
        size=size, pid=100 + rank, host="here", program="train.py", started_wall_ns=WALL_NS,
        started_monotonic_ns=0, groups={WORLD: tuple(range(size))}, entries=entries, overwritten=0,
        keys={WORLD: "key"},
    )  # fmt: skip
    return Recording(**(values | fields))


def job(
    *entries: list[Entry], states: tuple[str, ...] = (), now_s: float = 20.0, **fields: Any
) -> Job:
    """Return a job whose ranks have these entries, at a time of this node's clock."""
    size = fields.pop("size", len(entries))
    recordings = {rank: recording(rank, each, size) for rank, each in enumerate(entries)}
    for rank, end in fields.pop("ended", {}).items():
        recordings[rank] = replace(recordings[rank], ended=end)
    for rank, name in enumerate(fields.pop("workers", ())):
        recordings[rank].keys[name] = WORKER
    states = states or (RUNS,) * len(entries)
    return Job(recordings, dict(enumerate(states)), clocks_ns={"here": int(now_s * S)}, **fields)
