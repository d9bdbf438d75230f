"""Recordings as dumps of torch's flight recorder, one file a rank.

``torchfrtrace -p rank_ FOLDER`` reads them, and names a rank that is missing in a collective, or
that called another one or with another shape. It takes the operations of a group one by one from
all ranks and matches those of one number. So operations before the first one that every rank still
holds are left out; and a message under way has a group of its own, that of its two ranks, because
a number of its own among the collectives would shift the others. Messages that have ended are left
out: a rank may have recorded fewer of them than its peer.

Source: torch/csrc/distributed/c10d/FlightRecorder.hpp, format 2.10; torch/distributed/
flight_recorder.
"""

from __future__ import annotations

import math
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from mpidist import whole_file
from mpidist.comm.recorder.file_format import WORKER
from mpidist.comm.recorder.recording import Entry, Kind, Recording
from mpidist.comm.watchdog import flight_record
from mpidist.comm.watchdog.flight_record import KINDS, OTHER
from mpidist.reports import worlds

_PREFIX, _WORLD = "rank_", "world_"
# Number that a label has behind the name of its group.
_OF_LABEL = re.compile(r"#\d+$")
# Operations whose lists have one tensor for each rank, or whose tensors hold a part of each rank.
_GATHERS = ("all_gather", "gather")
_SCATTERS = ("scatter", "reduce_scatter")
_STATES = ("enqueued", "started", "completed")
_GATHERS_FLAT, _SCATTERS_FLAT = "_all_gather_base", "_reduce_scatter_base"

Dump = dict[str, Any]


def write_dumps(recordings: Iterable[Recording], folder: Path) -> list[Path]:
    """Write ``rank_<r>`` for each recording, which replaces a file of this name; return the files.

    Args:
        recordings: Of one job.
        folder: Made if it does not exist. Of a job of several worlds each has a folder in it,
            ``world_0``, ``world_1``, ...

    Raises:
        OSError: A file cannot be written.
    """
    current = worlds.of(recordings).current
    written = []
    for number, by_rank in enumerate(current.values()):
        place = folder / f"{_WORLD}{number}" if len(current) > 1 else folder
        place.mkdir(parents=True, exist_ok=True)
        first = _first_sequences(by_rank.values())
        for rank, recording in sorted(by_rank.items()):
            path = place / f"{_PREFIX}{rank}"
            with whole_file.replacing(path) as file:
                pickle.dump(dump(recording, first), file)
            written.append(path)
    return written


def dump(recording: Recording, first: Mapping[str, int] | None = None) -> Dump:
    """Return a recording as torch's recorder pickles its entries (pure).

    Args:
        first: The first collective that is returned of each group, by its key.
    """
    first = first or {}
    config = {
        key: flight_record.config_of(key, _name(label), recording.groups[label])
        for label, key in recording.keys.items()
        if key != WORKER
    }
    numbers = {key: number for number, key in enumerate(sorted(config))}
    status = {
        str(number): {f"last_{state}_collective": -1 for state in _STATES}
        for number in numbers.values()
    }
    entries: list[Dump] = []
    seen: Counter[str] = Counter()
    for entry in recording.entries:
        key = recording.keys.get(entry.group)
        if key is None:
            continue
        times = _times(recording, entry)
        if entry.kind is Kind.COLLECTIVE:
            states = status[str(numbers[key])]
            for state in _STATES[: 2 + (entry.end_ns is not None)]:
                states[f"last_{state}_collective"] = entry.sequence
            if entry.sequence >= first.get(key, 0):
                ranks = recording.groups[entry.group]
                entries.append(
                    {"pg_id": numbers[key], **_collective(entry, key, len(ranks)), **times}
                )
        elif entry.kind in (Kind.SEND, Kind.RECEIVE) and entry.end_ns is None:
            of_group = key, _name(entry.group), recording.groups[entry.group]
            is_send = entry.kind is Kind.SEND
            made = flight_record.message(
                of_group, entry.operation, is_send, recording.rank, entry.peer, seen
            )
            if made is not None:
                pair, described = made
                config.setdefault(pair["name"], pair)
                shapes = [list(entry.shape)]
                tensors = _tensors(entry, (shapes, shapes))
                entries.append({"pg_id": numbers[key], **described, **tensors, **times})
    record = flight_record.record_of(config, status, entries)
    return {**record, "rank": recording.rank, "host_name": recording.host}


def _first_sequences(recordings: Iterable[Recording]) -> dict[str, int]:
    """Return the first collective of each group, by its key, that all recordings still hold."""
    first: dict[str, int] = {}
    for recording in recordings:
        own: dict[str, int] = {}
        if recording.overwritten:
            # The oldest of the ring, not one that is kept because it is under way.
            for entry in recording.entries:
                if entry.number >= recording.oldest and entry.kind is Kind.COLLECTIVE:
                    own.setdefault(recording.keys.get(entry.group, ""), entry.sequence)
        for key, sequence in own.items():
            first[key] = max(first.get(key, 0), sequence)
    return first


def _name(label: str) -> str:
    return _OF_LABEL.sub("", label)


def _collective(entry: Entry, key: str, size: int) -> Dump:
    kind = KINDS.get(entry.operation, OTHER)
    sizes = _sizes(entry, kind, size)
    if sizes is None:
        kind, sizes = OTHER, ([[]], [[]])
    return {
        **flight_record.about(key, _name(entry.group), kind, entry.operation),
        "collective_seq_id": entry.sequence,
        "p2p_seq_id": 0,
        "is_p2p": False,
        **_tensors(entry, sizes),
    }


def _sizes(entry: Entry, kind: str, size: int) -> tuple[list[list[int]], list[list[int]]] | None:
    """Return the sizes of inputs and outputs; None of what differs between ranks by right.

    The entry has the shape of one tensor: of the first output, or of the first input without one.
    """
    if kind == OTHER or not entry.dtype:
        return None
    shape = list(entry.shape)
    one = math.prod(shape)
    if kind in _GATHERS or kind in _SCATTERS:
        item_bytes = getattr(torch, entry.dtype).itemsize
        # On a root the tensors of all ranks, on the others one.
        if entry.size_bytes not in (one * item_bytes, one * item_bytes * size):
            return None
        return ([shape], [[one * size]]) if kind in _GATHERS else ([[one * size]], [shape])
    if kind == _GATHERS_FLAT:
        return ([[one // size]], [[one]]) if one % size == 0 else None
    if kind == _SCATTERS_FLAT:
        return [[one * size]], [[one]]
    return [shape], [shape]


def _tensors(entry: Entry, sizes: tuple[list[list[int]], list[list[int]]]) -> Dump:
    dtypes = [entry.dtype] if entry.dtype and sizes[0] != [[]] else []
    return {
        "input_sizes": sizes[0],
        "input_dtypes": dtypes,
        "output_sizes": sizes[1],
        "output_dtypes": dtypes,
        "timeout_ms": 0,
    }


def _times(recording: Recording, entry: Entry) -> Dump:
    offset = recording.started_wall_ns - recording.started_monotonic_ns
    ended_ns = None if entry.end_ns is None else entry.end_ns + offset
    return flight_record.times(entry.begin_ns + offset, ended_ns, entry.end_ns is not None)
