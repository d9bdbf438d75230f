"""A job by its recordings (pure): its ranks' processes, their threads, and one clock of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from mpidist.comm.recorder.recording import Entry, Recording
from mpidist.comm.watchdog import last_operations, thread_places
from mpidist.comm.watchdog.call_waits import Thread
from mpidist.comm.watchdog.thread_stacks import Stack

# States of a process.
RUNS, STOPPED, ENDED, ELSEWHERE = "runs", "is stopped", "has ended", "on another node"


@dataclass(frozen=True)
class Job:
    """What is known of a job, or of one world of it: each program of several is one.

    Attributes:
        recordings: By world rank; those of other nodes may be missing.
        states: ``RUNS``, ``STOPPED``, ``ENDED`` or ``ELSEWHERE``, by world rank.
        stacks: Stacks of the threads of each rank that has written them.
        clocks_ns: Time of the monotonic clock of each host now; missing of other hosts.
        seen_ns: Time since the epoch at which each rank has written its stacks.
        left_out: Why files of the folder are none of the recordings.
    """

    recordings: Mapping[int, Recording]
    states: Mapping[int, str] = field(default_factory=dict)
    stacks: Mapping[int, Sequence[Stack]] = field(default_factory=dict)
    clocks_ns: Mapping[str, int] = field(default_factory=dict)
    seen_ns: Mapping[int, int] = field(default_factory=dict)
    left_out: Sequence[str] = ()

    @property
    def first(self) -> Recording:
        """Return the recording of the lowest rank."""
        return self.recordings[min(self.recordings)]

    @property
    def is_alive(self) -> bool:
        """Return whether a process of the job runs on this node, or is stopped."""
        return not {RUNS, STOPPED}.isdisjoint(self.states.values())

    @property
    def unknown(self) -> tuple[int, ...]:
        """Return the world ranks without a recording."""
        return tuple(rank for rank in range(self.first.size) if rank not in self.recordings)

    def with_state(self, state: str) -> tuple[int, ...]:
        """Return the world ranks whose processes are in a state."""
        return tuple(rank for rank, each in sorted(self.states.items()) if each == state)

    @cached_property
    def now_ns(self) -> dict[int, int]:
        """Return the time of each rank's monotonic clock.

        Of a job that has ended, and on another node, the last time that a recording there has.
        """
        last: dict[str, int] = {}
        for rank, recording in self.recordings.items():
            seen_ns = self.seen_ns.get(rank, 0) - self._offsets[recording.host]
            times = [
                entry.begin_ns if entry.end_ns is None else entry.end_ns
                for entry in recording.entries
            ]
            latest = max([recording.started_monotonic_ns, seen_ns, *times])
            last[recording.host] = max(last.get(recording.host, 0), latest)
        if self.is_alive:
            last |= self.clocks_ns
        return {rank: last[recording.host] for rank, recording in self.recordings.items()}

    @cached_property
    def under_way(self) -> dict[int, list[Entry]]:
        """Return the entries that have not ended, by world rank."""
        return {
            rank: [entry for entry in recording.entries if entry.end_ns is None]
            for rank, recording in self.recordings.items()
        }

    def under_way_at(self, rank: int, time_ns: int) -> dict[int, list[Entry]]:
        """Return the entries that had not ended at a time of a rank's clock, by world rank."""
        found = {}
        for other, recording in self.recordings.items():
            at_ns = self.same_time_ns(rank, time_ns, other)
            found[other] = [
                replace(entry, end_ns=None)
                for entry in recording.entries
                if entry.begin_ns <= at_ns and (entry.end_ns is None or entry.end_ns > at_ns)
            ]
        return found

    @cached_property
    def locks(self) -> dict[Thread, str]:
        """Return, of threads with a stack, the place of the lock they wait for, or ""."""
        return {
            (rank, stack.thread): place
            for rank, stacks in self.stacks.items()
            for stack in stacks
            if stack.thread and (place := thread_places.awaited(stack.lines)) is not None
        }

    @cached_property
    def workers(self) -> dict[int, str]:
        """Return the names of the workers of RPC, by world rank."""
        names = {rank: last_operations.worker_of(each) for rank, each in self.recordings.items()}
        return {rank: name for rank, name in names.items() if name}

    def innermost(self, rank: int) -> list[Entry]:
        """Return what each thread of a rank is in, the longest under way first."""
        threads = {entry.thread: entry for entry in self.under_way[rank]}
        return sorted(threads.values(), key=lambda entry: entry.begin_ns)

    def last(self, rank: int) -> Entry | None:
        """Return the entry of a rank that ended last; None if none has ended."""
        ended = [entry for entry in self.recordings[rank].entries if entry.end_ns is not None]
        return max(ended, key=lambda entry: entry.end_ns or 0, default=None)

    def age_s(self, rank: int, time_ns: int) -> float:
        """Return the seconds since a time of a rank's monotonic clock."""
        return (self.now_ns[rank] - time_ns) / 1e9

    def wall_ns(self, rank: int, time_ns: int) -> int:
        """Return the time since the epoch of a time of a rank's monotonic clock."""
        return self._offsets[self.recordings[rank].host] + time_ns

    def same_time_ns(self, rank: int, time_ns: int, other: int) -> int:
        """Return a time of a rank's monotonic clock as one of another rank's."""
        return self.wall_ns(rank, time_ns) - self._offsets[self.recordings[other].host]

    @cached_property
    def _offsets(self) -> dict[str, int]:
        """Return the difference of both clocks by host.

        One for all ranks of a host, whose order a wall clock that was set meanwhile would change.
        """
        offsets: dict[str, int] = {}
        for recording in self.recordings.values():
            offset = recording.started_wall_ns - recording.started_monotonic_ns
            offsets.setdefault(recording.host, offset)
        return offsets
