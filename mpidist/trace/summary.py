"""Figures of a trace: late ranks, exposed communication, bandwidths, the longest waits."""

from __future__ import annotations

import heapq
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mpidist.comm.recorder.recording import Kind
from mpidist.comm.watchdog import stragglers
from mpidist.trace.chrome_file import Event, Reading

LONGEST = 10  # waits that are listed
# Kinds in which the main thread communicates, or waits for communication.
_COMMUNICATION = {
    kind.value for kind in (Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE, Kind.CALL, Kind.WAIT)
}


class RankFigures(NamedTuple):
    """Figures of one rank.

    Attributes:
        rank: World rank.
        host: Its host.
        collectives: Collectives of which all members are in the trace.
        last: Of these, those at which it was the last.
        late_us: Its median lateness, after the middle rank.
        waited_us: Its waits for the last rank of each collective, together.
        exposed_us: Time of its main thread in collectives, messages, calls and waits for them.
        recorded_us: Duration of the recording.
    """

    rank: int
    host: str
    collectives: int
    last: int
    late_us: float
    waited_us: float
    exposed_us: float
    recorded_us: float


class Bandwidth(NamedTuple):
    """Transfers of one operation and size.

    Attributes:
        operation: Its name.
        size_bytes: Upper end of the class of sizes, a power of two.
        transfers: Number of collectives or messages.
        time_us: Median time; of a collective from its last arrival to its last end.
        gigabytes_per_s: Bytes of a rank's tensor by that time; median.
        tuned: The fastest algorithm of ``mpidist tune``'s table at this size; "" without a table.
    """

    operation: str
    size_bytes: int
    transfers: int
    time_us: float
    gigabytes_per_s: float
    tuned: str


class Wait(NamedTuple):
    """One wait.

    Attributes:
        seconds: From the rank's begin to the last arrival, of other operations to their end.
        rank: The rank that waits.
        operation: What it waits in.
        group: The group; "" without one.
        sequence: Number within the group; 0 without one.
        peer: The rank that it waits for; -1 if that is not known.
        at_us: The begin, from the begin of the trace.
    """

    seconds: float
    rank: int
    operation: str
    group: str
    sequence: int
    peer: int
    at_us: float


@dataclass(frozen=True)
class Summary:
    """Figures of a trace.

    Attributes:
        ranks: By rank.
        bandwidths: By operation and size.
        waits: The longest, the longest first.
        stragglers: Sentences on ranks that are late again and again.
        notes: Sentences on what the trace lacks.
    """

    ranks: list[RankFigures]
    bandwidths: list[Bandwidth]
    waits: list[Wait]
    stragglers: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class _Call(NamedTuple):
    begin: float
    end: float
    size_bytes: int


def read(path: Path) -> Summary:
    """Return the figures of a trace file.

    Raises:
        ValueError: It is no trace of mpidist, or cut.
        OSError: It cannot be read.
    """
    reading = Reading(path)
    facts = reading.facts.get("mpidist") if isinstance(reading.facts, dict) else None
    if not isinstance(facts, dict):
        raise ValueError(
            f"{path} is no trace of mpidist.trace.record: it does not say whose ranks it has"
        )
    return summary(facts, reading.events())


def summary(facts: dict[str, Any], events: Iterable[Event]) -> Summary:
    """Return the figures of events.

    Args:
        facts: Of the trace (``session``).
        events: Its events; those of other programs are left out.
    """
    figures = _Figures(facts)
    for event in events:
        if event.get("pid") not in figures.ranks:
            continue
        if event.get("ph") == "X":
            figures.add(event)
        elif event.get("name") == "thread_name" and event["args"].get("is_main"):
            figures.main_tracks.add((event["pid"], event["tid"]))
    return figures.summary()


class _Figures:
    def __init__(self, facts: dict[str, Any]) -> None:
        self.ranks: dict[int, dict[str, Any]] = {row["rank"]: row for row in facts["ranks"]}
        self.main_tracks: set[tuple[int, int]] = set()
        self._facts = facts
        # By the group's number in the facts, and the number within the group: each rank's call.
        self._collectives: dict[tuple[int, int], dict[int, _Call]] = {}
        self._names: dict[tuple[int, int], str] = {}
        self._labels: dict[int, str] = {}  # of groups
        self._main: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        self._times: defaultdict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
        self._waits: list[Wait] = []
        self._steps: defaultdict[int, list[float]] = defaultdict(list)

    def add(self, event: Event) -> None:
        rank, args, kind = event["pid"], event.get("args", {}), event.get("cat")
        begin = event["ts"]
        end = begin + event["dur"]
        size = args.get("bytes", 0)
        if kind in _COMMUNICATION and (rank, event["tid"]) in self.main_tracks:
            self._main[rank].append((begin, end))
        if kind == Kind.COLLECTIVE.value and args.get("sequence"):
            label = args.get("group", "")
            group = self.ranks[rank]["groups"].get(label)
            if group is None:
                return
            key = group, args["sequence"]
            # An operation within this one may have its number, and comes behind it.
            self._collectives.setdefault(key, {}).setdefault(rank, _Call(begin, end, size))
            self._names.setdefault(key, event["name"])
            self._labels.setdefault(group, label)
        elif kind in _COMMUNICATION and kind != Kind.WAIT.value:
            if size and not args.get("unfinished"):
                self._times[event["name"], _class_of(size)].append((end - begin, size))
            self._add_wait(Wait(
                (end - begin) / 1e6, rank, event["name"], args.get("group", ""), 0,
                args.get("peer", -1), begin,
            ))  # fmt: skip
        elif kind == Kind.STEP.value:
            self._steps[rank].append(begin)

    def summary(self) -> Summary:
        late: defaultdict[int, list[float]] = defaultdict(list)
        last: defaultdict[int, int] = defaultdict(int)
        waited: defaultdict[int, float] = defaultdict(float)
        complete: defaultdict[int, list[int]] = defaultdict(list)
        for key, calls in self._collectives.items():
            name, (group, sequence) = self._names[key], key
            members = self._facts["groups"][group][1]
            if len(members) < 2 or len(calls) < len(members):
                continue
            complete[group].append(sequence)
            latest = max(calls, key=lambda rank: calls[rank].begin)
            last[latest] += 1
            at = calls[latest].begin
            arrivals = {rank: int(call.begin * 1e3) for rank, call in calls.items()}
            for rank, late_ns in stragglers.lateness(arrivals).items():
                late[rank].append(late_ns / 1e3)
                wait_us = max(min(at, calls[rank].end) - calls[rank].begin, 0.0)
                waited[rank] += wait_us
                if rank != latest:
                    self._add_wait(
                        Wait(wait_us / 1e6, rank, name, self._labels[group], sequence, latest,
                             calls[rank].begin)
                    )  # fmt: skip
            size = max(call.size_bytes for call in calls.values())
            if size:
                time_us = max(call.end for call in calls.values()) - at
                self._times[name, _class_of(size)].append((time_us, size))
        rows = [
            RankFigures(
                rank, row["host"], len(late[rank]), last[rank],
                statistics.median(late[rank]) if late[rank] else 0.0,
                waited[rank], _covered(self._main[rank]), self._facts["duration_us"],
            )
            for rank, row in sorted(self.ranks.items())
        ]  # fmt: skip
        waits = sorted(self._waits, reverse=True)[:LONGEST]
        return Summary(
            rows, list(self._bandwidths()), waits, list(self._stragglers(complete)),
            list(self._notes()),
        )  # fmt: skip

    def _add_wait(self, wait: Wait) -> None:
        if len(self._waits) < LONGEST:
            heapq.heappush(self._waits, wait)
        else:
            heapq.heappushpop(self._waits, wait)

    def _bandwidths(self) -> Iterator[Bandwidth]:
        for (name, size), times in sorted(self._times.items()):
            rates = [nbytes / time_us / 1e3 for time_us, nbytes in times if time_us > 0]
            yield Bandwidth(
                name, size, len(times), statistics.median(time for time, _ in times),
                statistics.median(rates) if rates else 0.0, self._tuned(name, size),
            )  # fmt: skip

    def _tuned(self, operation: str, size: int) -> str:
        table = self._facts.get("tuning") or []
        if operation != "all_reduce" or not table:
            return ""
        _, algorithm = min(table, key=lambda row: max(size, row[0]) / max(min(size, row[0]), 1))
        return str(algorithm)

    def _stragglers(self, complete: dict[int, list[int]]) -> Iterator[str]:
        for group, sequences in complete.items():
            keys = [(group, sequence) for sequence in sorted(sequences)]
            calls = [self._collectives[key] for key in keys]
            arrivals = [
                {rank: int(call.begin * 1e3) for rank, call in one.items()} for one in calls
            ]
            first = min(calls[0])
            shapes = [
                (self._names[key], one[first].size_bytes)
                for key, one in zip(keys, calls, strict=True)
            ]
            steps = [int(at_us * 1e3) for at_us in self._steps[first]]
            step_ns = stragglers.interval_of(steps) or stragglers.step_of(
                shapes, [at[first] for at in arrivals]
            )
            for one in stragglers.found(arrivals, step_ns):
                host = self.ranks[one.rank]["host"]
                yield stragglers.sentence(one, self._labels[group], host, step_ns or 0)

    def _notes(self) -> Iterator[str]:
        missing = self._facts["size"] - len(self.ranks)
        if missing:
            yield f"{missing} of {self._facts['size']} ranks are not in the trace"
        for rank, row in sorted(self.ranks.items()):
            if row["lost"]:
                yield (
                    f"rank {rank} has lost {row['lost']} entries, which were overwritten before "
                    "they were read"
                )
            if row["clock_jumped"]:
                yield (
                    f"the clock of rank {rank} has jumped: its times may be wrong by "
                    f"{row['clock_error_us']:.0f} us"
                )


def _class_of(size_bytes: int) -> int:
    """Return the power of two that is not below a size."""
    return 1 << (size_bytes - 1).bit_length()


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return the time that spans cover; what several cover counts once."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        if end > until:
            total += end - max(begin, until)
            until = end
    return total
