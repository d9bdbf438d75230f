"""Traces of torch's profiler laid on the clock of a trace of mpidist.

torch's profiler writes times as us after ``baseTimeNanoseconds``, which are of the wall clock
(Unix time). A trace of mpidist has the wall clock of each rank at its begin and its end; a line
between these two puts a rank's profile beside its own slices, on rank 0's clock.

A profile is that of the rank which torch.distributed has written into it (``distributedInfo``),
else of the rank whose process has its id, else of the one that the file's name has behind ``rank``.

Source: torch/csrc/profiler/containers.h, kineto's output_json.cpp.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpidist.trace.chrome_file import Event, Facts, Reading, text_of, written

_RANK_IN_NAME = re.compile(r"rank[-_.]?(\d+)")
# Behind the ranks' own, in Perfetto's order of processes.
_FIRST_PROCESS = 1_000_000
_FIRST_ARROW = 1 << 40
# A wall clock that moves further against the monotonic one than its drift was set by somebody.
_MOST_DRIFT, _LEAST_JUMP_NS = 1e-3, 1_000_000


def merge(out: Path, files: Sequence[Path]) -> list[str]:
    """Write one trace of a trace of mpidist and traces of torch's profiler; return remarks.

    Args:
        out: The file that is written; by gzip if it ends in ``.gz``.
        files: A trace of ``mpidist.trace``, or parts of one that ranks have written alone, and
            those of torch's profiler, in any order.

    Raises:
        ValueError: A file is no trace, the trace of mpidist is missing or there are several, or the
            rank of a profile is not known.
        OSError: A file cannot be read or written.
    """
    readings = [Reading(path) for path in files]
    own = [reading for reading in readings if "mpidist" in reading.facts]
    facts = joined([reading.facts["mpidist"] for reading in own])
    walls = {row["rank"]: _Wall(row) for row in facts["ranks"]}
    profiles = [(reading, rank_of(reading, facts)) for reading in readings if reading not in own]
    remarks = []
    for _, rank in profiles:
        if walls[rank].has_jumped:
            remarks.append(
                f"the wall clock of rank {rank} was set during the trace: its profile may be wrong "
                f"by {walls[rank].jump_ns / 1e3:.0f} us"
            )
    with written(out) as file:
        file.begin({"mpidist": facts})
        for reading in own:
            file.write(reading.lines())
        numbers = _Numbers()
        for reading, rank in profiles:
            file.write(map(text_of, laid(reading, rank, walls[rank].common_us, numbers)))
    return remarks


def joined(parts: Sequence[Facts]) -> Facts:
    """Return the facts of a trace from those of its parts.

    Raises:
        ValueError: There is none, they are of several traces, or two have the same rank.
    """
    if len({part.get("trace") for part in parts}) != 1:
        raise ValueError(
            "merge needs one trace of mpidist.trace.record, or parts of one, which has the clocks "
            f"of all ranks; got {len(parts)} of {len({part.get('trace') for part in parts})} traces"
        )
    groups: dict[tuple[str, tuple[int, ...]], int] = {}
    rows = []
    for part in parts:
        numbers = [
            groups.setdefault((key, tuple(members)), len(groups)) for key, members in part["groups"]
        ]
        for row in part["ranks"]:
            held = {label: numbers[number] for label, number in row["groups"].items()}
            rows.append({**row, "groups": held})
    if len({row["rank"] for row in rows}) < len(rows):
        raise ValueError("merge got two parts of one rank")
    return {
        **parts[0],
        "ranks": sorted(rows, key=lambda row: int(row["rank"])),
        "groups": [[key, list(members)] for key, members in groups],
        "duration_us": max(part["duration_us"] for part in parts),
    }


def rank_of(reading: Reading, facts: Facts) -> int:
    """Return the world rank of a profile.

    Args:
        reading: The profile.
        facts: Of the trace of mpidist.

    Raises:
        ValueError: It is not known.
    """
    ranks = {row["rank"] for row in facts["ranks"]}
    told = reading.facts.get("distributedInfo", {})
    if isinstance(told, dict) and told.get("rank") in ranks:
        return int(told["rank"])
    pids = {event.get("pid") for event in reading.events() if event.get("ph") == "X"}
    host = reading.facts.get("host_name")
    held = [row["rank"] for row in facts["ranks"] if row["pid"] in pids and row["host"] == host]
    if len(held) == 1:
        return int(held[0])
    named = _RANK_IN_NAME.search(reading.path.name)
    if named and int(named[1]) in ranks:
        return int(named[1])
    raise ValueError(
        f"{reading.path} does not say its rank: it has no distributedInfo, no process of the trace "
        "and no rank in its name; rename it to rank<number>.json"
    )


class _Wall:
    """Wall clock of a rank, from its facts: (wall clock, common clock) at begin and end, in ns."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        (self._wall, self._common), (last_wall, last_common) = row["wall"]
        length = last_wall - self._wall
        self.jump_ns = abs((last_common - self._common) - length)
        self.has_jumped = length <= 0 or self.jump_ns > _LEAST_JUMP_NS + _MOST_DRIFT * length
        self._slope = 1.0 if self.has_jumped else (last_common - self._common) / length

    def common_us(self, wall_ns: int) -> float:
        """Return the time in the trace, in us."""
        return (self._common + (wall_ns - self._wall) * self._slope) / 1e3


class _Numbers:
    """Numbers of processes and arrows that no other file of a merged trace has."""

    def __init__(self) -> None:
        self._processes: dict[tuple[int, object], int] = {}
        self._arrows: dict[tuple[int, object, object], int] = {}

    def process(self, rank: int, pid: object) -> int:
        return self._processes.setdefault((rank, pid), _FIRST_PROCESS + len(self._processes))

    def arrow(self, rank: int, category: object, number: object) -> int:
        key = (rank, category, json.dumps(number))
        return self._arrows.setdefault(key, _FIRST_ARROW + len(self._arrows))


def laid(
    reading: Reading, rank: int, common_us: Callable[[int], float], numbers: _Numbers
) -> Iterator[Event]:
    """Yield the events of a profile with the times, processes and arrows of the merged trace."""
    base_ns = int(reading.facts.get("baseTimeNanoseconds", 0))
    for event in reading.events():
        moved = dict(event)
        if isinstance(event.get("ts"), int | float):
            moved["ts"] = round(common_us(base_ns + round(event["ts"] * 1e3)), 3)
        if "pid" in event:
            moved["pid"] = numbers.process(rank, event["pid"])
        if "id" in event:
            moved["id"] = numbers.arrow(rank, event.get("cat"), event["id"])
        args = event.get("args", {})
        if event.get("ph") == "M" and event.get("name") == "process_name":
            moved["args"] = {"name": f"rank {rank}: torch, {args.get('name', '')}"}
        elif event.get("ph") == "M" and event.get("name") == "process_sort_index":
            moved["args"] = {"sort_index": rank}
        yield moved
