"""The last operations of all ranks in one order (pure): equal ones of several ranks are one row."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpidist.comm.recorder.recording import Entry, Kind, Recording
from mpidist.comm.watchdog.last_operations import described, duration
from mpidist.reports.job import Job


@dataclass
class Row:
    """One operation of one rank or several.

    Attributes:
        begin_ns: The first begin, in ns since the epoch.
        entries: By world rank.
        ages_s: Seconds that each has taken, or takes until now.
    """

    begin_ns: int
    entries: dict[int, Entry] = field(default_factory=dict)
    ages_s: dict[int, float] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Return the operation, its number, its group or peer, and its tensor."""
        return described(next(iter(self.entries.values())))

    @property
    def ending(self) -> str:
        """Return how long the longest has taken, and whether it is under way or has failed."""
        took = duration(max(self.ages_s.values()))
        entries = list(self.entries.values())
        under_way = sum(entry.end_ns is None for entry in entries)
        if under_way:
            of = "" if under_way == len(entries) else f"{under_way} of {len(entries)} "
            return f"{of}under way {took}"
        return f"{took}, failed" if any(entry.failed for entry in entries) else took


def rows(job: Job, count: int) -> list[Row]:
    """Return the last operations of all ranks in the order of their begins, under way or not.

    Args:
        count: Most rows of operations that have ended.
    """
    items = [
        (job.wall_ns(rank, entry.begin_ns), rank, entry)
        for rank, recording in job.recordings.items()
        for entry in (
            *(each for each in job.under_way[rank] if each not in recording.entries[-count:]),
            *recording.entries[-count:],
        )
    ]
    found: dict[object, Row] = {}
    for begin_ns, rank, entry in sorted(items, key=lambda item: -item[0]):
        key = _key(job.recordings[rank], entry)
        # A rank may have begun long ago what others have begun just now, or are still in.
        if key not in found and len(found) >= count and entry.end_ns is not None:
            continue
        row = found.setdefault(key, Row(begin_ns))
        row.begin_ns = begin_ns
        row.entries[rank] = entry
        end_ns = job.now_ns[rank] if entry.end_ns is None else entry.end_ns
        row.ages_s[rank] = (end_ns - entry.begin_ns) / 1e9
    return sorted(found.values(), key=lambda row: row.begin_ns)


def _key(recording: Recording, entry: Entry) -> object:
    """Return what the entries of one row have alike."""
    if entry.kind is not Kind.COLLECTIVE or not entry.sequence:
        return recording.rank, entry.number
    key = recording.keys.get(entry.group, entry.group)
    return key, entry.sequence, entry.operation, entry.shape, entry.dtype
