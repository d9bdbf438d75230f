"""Events of one rank in Chrome's form: its entries as slices on tracks, a track for each thread.

Slices of one track must nest. Those of a thread that overlap otherwise (calls that wait for their
answers at the same time) go to further tracks of the thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mpidist.comm.recorder.recording import Entry
from mpidist.trace.chrome_file import text_of


class Slice(NamedTuple):
    """An entry on a track.

    Attributes:
        entry: The entry.
        track: Number of its track, within the rank.
        begin_ns: Begin on the common clock, from the begin of the trace.
        end_ns: End; of an entry that is under way the end of the trace.
    """

    entry: Entry
    track: int
    begin_ns: int
    end_ns: int


class Spot(NamedTuple):
    """An end of an arrow: a time in a slice."""

    rank: int
    track: int
    time_ns: int


@dataclass
class Tracks:
    """Tracks of one rank.

    Attributes:
        rank: World rank, the number of the process in the trace.
        names: Name of each track, by number.
        main: Tracks of the main thread.
    """

    rank: int
    names: list[str] = field(default_factory=list)
    main: list[int] = field(default_factory=list)

    def placed(
        self,
        entries: Sequence[Entry],
        common: Callable[[int], int],
        begin_ns: int,
        end_ns: int,
        threads: Mapping[int, str],
        main_thread: int,
    ) -> Iterator[Slice]:
        """Yield the slices of entries, in the order of their begins.

        Args:
            entries: Of this rank, in any order.
            common: From the rank's clock to the common one.
            begin_ns, end_ns: Of the trace, on the common clock.
            threads: Names of threads by native id.
            main_thread: Native id of the main thread.
        """
        # Of each thread: the track and the ends of the slices that are open there.
        open_slices: dict[int, list[tuple[int, list[int]]]] = {}
        for entry in sorted(entries, key=lambda entry: (entry.begin_ns, -_end(entry))):
            begin = common(entry.begin_ns)
            end = end_ns if entry.end_ns is None else max(common(entry.end_ns), begin)
            thread = entry.thread
            tracks = open_slices.setdefault(thread, [])
            for number, ends in tracks:
                while ends and ends[-1] <= begin:
                    ends.pop()
                if not ends or end <= ends[-1]:
                    track = number
                    break
            else:
                ends = []
                name = "main" if thread == main_thread else threads.get(thread, f"thread {thread}")
                track = self._added(name, len(tracks), thread == main_thread)
                tracks.append((track, ends))
            ends.append(end)
            yield Slice(entry, track, begin - begin_ns, end - begin_ns)

    def described(self, host: str) -> Iterator[str]:
        """Yield the events that name the process and its tracks."""
        about = {"ph": "M", "pid": self.rank}
        yield text_of({**about, "name": "process_name", "args": {"name": f"rank {self.rank}"}})
        yield text_of({**about, "name": "process_labels", "args": {"labels": host}})
        order = {"sort_index": self.rank}
        yield text_of({**about, "name": "process_sort_index", "args": order})
        for track, name in enumerate(self.names):
            # For the summary; other readers take the name alone.
            args = {"name": name, "is_main": track in self.main}
            yield text_of({**about, "tid": track, "name": "thread_name", "args": args})

    def _added(self, name: str, others: int, is_main: bool) -> int:
        track = len(self.names)
        self.names.append(f"{name} ({others + 1})" if others else name)
        if is_main:
            self.main.append(track)
        return track


class SliceTexts:
    """Texts of slices; what all slices of one signature share is written once.

    Args:
        rank: World rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._known: dict[tuple[object, ...], tuple[str, str]] = {}

    def of(self, placed: Slice) -> str:
        """Return the event of a slice; its times are in us."""
        entry, track, begin_ns, end_ns = placed
        key = (entry.kind, entry.operation, entry.group, entry.dtype, entry.shape)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._signature(entry)
        head, args = known
        if entry.sequence:
            args += f',"sequence":{entry.sequence}'
        if entry.size_bytes:
            args += f',"bytes":{entry.size_bytes}'
        if entry.peer >= 0:
            args += f',"peer":{entry.peer}'
        if entry.tag:
            args += f',"tag":{entry.tag}'
        if entry.end_ns is None:
            args += ',"unfinished":true'
        if entry.failed:
            args += ',"failed":true'
        return (
            f'{head}{track},"ts":{begin_ns / 1000:.3f},"dur":{(end_ns - begin_ns) / 1000:.3f},'
            f'"args":{{{args[1:]}}}}}'
        )

    def _signature(self, entry: Entry) -> tuple[str, str]:
        kind = json.dumps(str(entry.kind.value))
        head = (
            f'{{"ph":"X","name":{json.dumps(entry.operation)},"cat":{kind},"pid":{self._rank},'
            '"tid":'
        )
        args = f',"group":{json.dumps(entry.group)}' if entry.group else ""
        if entry.dtype:
            args += f',"dtype":{json.dumps(entry.dtype)},"shape":{json.dumps(list(entry.shape))}'
        return head, args


def arrow(number: int, name: str, tail: Spot, head: Spot) -> tuple[str, str]:
    """Return the two events of an arrow, which bind to the slices around their times."""
    text = f'"cat":"arrow","name":"{name}","id":{number}'
    return (
        f'{{"ph":"s",{text},"pid":{tail.rank},"tid":{tail.track},"ts":{tail.time_ns / 1000:.3f}}}',
        f'{{"ph":"f","bp":"e",{text},"pid":{head.rank},"tid":{head.track},'
        f'"ts":{head.time_ns / 1000:.3f}}}',
    )


def spot_of_begin(rank: int, placed: Slice) -> Spot:
    """Return the begin of a slice."""
    return Spot(rank, placed.track, placed.begin_ns)


def spot_of_end(rank: int, placed: Slice) -> Spot:
    """Return the end of a slice; within it, because its own end belongs to the next one."""
    return Spot(rank, placed.track, max(placed.end_ns - 1, placed.begin_ns))


def _end(entry: Entry) -> float:
    return float("inf") if entry.end_ns is None else entry.end_ns
