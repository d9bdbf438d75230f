"""Recording: what a recorder's file says, read while its process runs or after its death."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from mpidist import shared_place
from mpidist.comm.mpi import job_folder, launcher_env
from mpidist.comm.mpi.process_start import start_ticks
from mpidist.comm.recorder import file_format
from mpidist.comm.recorder.file_format import HEADER, HEADER_BYTES, SLOT, SLOT_BYTES, UNDER_WAY
from mpidist.errors import RecordingError

_PREFIX = "recorder-"
_LARGEST = 1 << 28  # bytes of a file that is read


class Kind(str, Enum):
    """Kind of an operation."""

    COLLECTIVE = "collective"
    SEND = "send"
    RECEIVE = "receive"
    CALL = "call"  # an RPC, at its caller
    HANDLER = "handler"  # a call that is executed here
    BACKWARD = "backward"  # of distributed autograd
    STEP = "step"  # of an optimizer
    COMMIT = "commit"
    WAIT = "wait"  # of a thread for what another thread executes

    __str__ = str.__str__


# Kind, operation, group, dtype and shape.
Signature = tuple[Kind, str, str, str, tuple[int, ...]]


class Ended(NamedTuple):
    """What has ended a process: an exception, or mpidist.

    Attributes:
        type_name: Name of the exception's class; "" where mpidist has ended the job.
        text: Its message or the reason, in one line.
        frames: File, number of the line and function's name of where it was raised, the innermost
            frame first.
    """

    type_name: str
    text: str
    frames: tuple[tuple[str, int, str], ...] = ()


class Table(NamedTuple):
    """Table of a file.

    Attributes:
        signatures: By their numbers.
        groups: World ranks of each group of the last world, by its label.
        keys: Key of each group, by its label.
        ended: What has ended the process, if it could tell.
        worlds: Keys of the worlds that the process has been in, the last one last.
        first: Number of the process's first entry in the last world.
    """

    signatures: list[Signature]
    groups: dict[str, tuple[int, ...]]
    keys: dict[str, str]
    ended: Ended | None
    worlds: tuple[str, ...] = ("",)
    first: int = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One operation of a process.

    Attributes:
        number: Of this process, from 1, in the order of begins.
        kind: Its kind.
        operation: Its name: of the collective, the message's function, the called function, the
            optimizer's class.
        group: Label of its group, as in ``Recording.groups``; empty without one.
        sequence: Number among the group's collectives; 0 for what is none.
        dtype: Of its tensor; empty without one.
        shape: Of its tensor.
        size_bytes: Of its data.
        peer: World rank of the other side; -1 where there is none, or any.
        tag: Of a message; the number of a call, the same at caller and callee; that of a backward
            pass, the same on all workers; else 0.
        thread: Native thread id.
        begin_ns: ``time.monotonic_ns`` at its begin.
        end_ns: At its end; None while it is under way, also if its process died in it.
        failed: It ended by an exception.
    """

    number: int
    kind: Kind
    operation: str
    group: str
    sequence: int
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    peer: int
    tag: int
    thread: int
    begin_ns: int
    end_ns: int | None
    failed: bool


@dataclass(frozen=True, slots=True)
class Recording:
    """The last operations of one process in the last world that it has entered, and what it was.

    Attributes:
        path: Of the file.
        version: Of its format.
        job: Name of the job.
        rank: World rank, and ``size`` the number of ranks.
        pid: Process id on ``host``.
        program: Its command line.
        started_wall_ns: ``time.time_ns`` at the recorder's start.
        started_monotonic_ns: ``time.monotonic_ns`` at the same moment.
        groups: World ranks of each group, by its label: its name, with a number behind it where
            another group of this process has that name.
        keys: Key of each group, the same on all its ranks, by its label.
        entries: Those in this world, by number. Those under way are kept longer than the others.
        overwritten: Number of entries in this world that the file no longer holds.
        started_ticks: Start of the process, in clock ticks since the boot of its node.
        ended: What has ended it; None if it lives, or could not tell, as of a signal.
        worlds: Keys of the worlds that it has been in, this one last.
        oldest: The file holds all entries from this number on.
    """

    path: Path
    version: int
    job: str
    rank: int
    size: int
    pid: int
    host: str
    program: str
    started_wall_ns: int
    started_monotonic_ns: int
    groups: dict[str, tuple[int, ...]]
    entries: list[Entry]
    overwritten: int
    keys: dict[str, str] = field(default_factory=dict)
    started_ticks: int = 0
    ended: Ended | None = None
    worlds: tuple[str, ...] = ("",)
    oldest: int = 1

    @property
    def is_alive(self) -> bool:
        """Return whether the process runs on this node."""
        return (
            self.host == socket.gethostname()
            and self.started_ticks != 0
            and start_ticks(self.pid) == self.started_ticks
        )


def read(path: Path) -> Recording:
    """Return what a file says, at any time: its process may write it meanwhile.

    Raises:
        RecordingError: It is no recording, of another version, or cut.
        OSError: It cannot be read.
    """
    # Of whichever user: somebody else may have collected the files.
    file = shared_place.opened(path, _LARGEST, is_own=False)
    try:
        header = _header(path, os.pread(file, HEADER_BYTES, 0), os.fstat(file).st_size)
        slots_bytes = (header.slots + header.kept) * SLOT_BYTES
        before, copy, after = (os.pread(file, slots_bytes, HEADER_BYTES) for _ in range(3))
        # Behind the slots: the table has every signature that they name.
        published = _header(path, os.pread(file, HEADER_BYTES, 0), header.file_bytes).published
        table = os.pread(file, published, HEADER_BYTES + slots_bytes)
    finally:
        os.close(file)
    try:
        known = read_table(table)
        entries, newest = _entries(before, copy, after, known.signatures)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise RecordingError(f"{path} is a damaged recording: {error!r}") from error
    own = [each for each in entries if each.number >= known.first]
    return Recording(
        path=path, version=file_format.VERSION, job=header.job, rank=header.rank,
        size=header.size, pid=header.pid, host=header.host, program=header.program,
        started_wall_ns=header.wall_ns, started_monotonic_ns=header.monotonic_ns,
        groups=known.groups, entries=own,
        overwritten=own[-1].number - known.first + 1 - len(own) if own else 0,
        keys=known.keys, started_ticks=header.ticks, ended=known.ended, worlds=known.worlds,
        oldest=max(newest - header.slots, 0) + 1,
    )  # fmt: skip


def recordings(job: str | None = None) -> list[Recording]:
    """Return the recordings of a job on this node, by rank.

    Files that are no recordings, or were removed meanwhile, are left out.

    Args:
        job: Name of a job of this user, or a folder; None for the job that started last.
    """
    if job is None:
        found = [read_all(folder) for folder in job_folder.jobs_folders()]
        return max(found, key=_last_start, default=[])
    if os.sep in job:
        return read_all(Path(job))
    path = job_folder.path_of(launcher_env.in_file_names(job))
    return read_all(path) if path in job_folder.jobs_folders() else []


def read_all(folder: Path) -> list[Recording]:
    """Return the recordings of a folder, by rank."""
    return read_folder(folder).recordings


class FolderRecordings(NamedTuple):
    """What the recordings of a folder say.

    Attributes:
        recordings: By rank.
        unread: Why files, or the folder, could not be read.
    """

    recordings: list[Recording]
    unread: list[str]


def read_folder(folder: Path) -> FolderRecordings:
    """Return the recordings of a folder, and why others could not be read."""
    found, unread = [], []
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return FolderRecordings([], [f"{folder}: {error.strerror}"])
    for name in names:
        if not (name.startswith(_PREFIX) and name.removeprefix(_PREFIX).isdigit()):
            continue
        try:
            found.append(read(folder / name))
        except RecordingError as error:
            unread.append(str(error))
        except FileNotFoundError:
            continue  # a job that ends well removes its own
        except OSError as error:
            unread.append(f"{folder / name}: {error.strerror}")
    return FolderRecordings(sorted(found, key=lambda recording: recording.rank), unread)


@dataclass(frozen=True, slots=True)
class _Header:
    slots: int
    kept: int
    table_bytes: int
    published: int
    wall_ns: int
    monotonic_ns: int
    ticks: int
    rank: int
    size: int
    pid: int
    job: str
    host: str
    program: str

    @property
    def file_bytes(self) -> int:
        return file_format.file_bytes(self.slots, self.kept, self.table_bytes)


def _header(path: Path, data: bytes, file_bytes: int) -> _Header:
    if len(data) < HEADER.size or not data.startswith(file_format.MAGIC):
        raise RecordingError(f"{path} is no recording of mpidist")
    _, version, *numbers, job, host, program = HEADER.unpack_from(data)
    if version != file_format.VERSION:
        raise RecordingError(
            f"{path} is a recording of version {version}; this mpidist reads version "
            f"{file_format.VERSION}"
        )
    header = _Header(*numbers, *map(_text, (job, host, program)))
    if header.file_bytes > _LARGEST or not 0 <= header.published <= header.table_bytes:
        raise RecordingError(f"{path} is a damaged recording: its header has impossible sizes")
    if file_bytes != header.file_bytes:
        raise RecordingError(
            f"{path} is cut: {file_bytes} bytes of {header.file_bytes} of a recording"
        )
    return header


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


def read_table(table: bytes) -> Table:
    """Return what the records of a table say."""
    signatures: list[Signature] = []
    groups: dict[str, tuple[int, ...]] = {}
    keys: dict[str, str] = {}
    worlds: list[str] = []
    ended, first, at = None, 1, 0
    while at < len(table):
        begin = at + file_format.LENGTH.size
        (length,) = file_format.LENGTH.unpack_from(table, at)
        at = begin + length
        what, *fields = json.loads(table[begin:at])
        if what == "signature":
            kind, operation, group, dtype, shape = fields
            signatures.append((Kind(kind), operation, group, dtype, tuple(shape)))
        elif what == "group":
            label, key, ranks = fields
            groups[label] = tuple(range(*ranks["range"]) if isinstance(ranks, dict) else ranks)
            keys[label] = key
        elif what == "world":
            world, first = fields
            worlds.append(str(world))
            groups.clear()
            keys.clear()
        elif what == "end":
            type_name, text, frames = fields
            # What follows the first is its effect.
            ended = ended or Ended(
                str(type_name),
                " ".join(str(text).split()),
                tuple((str(file), int(line), str(name)) for file, line, name in frames),
            )
    return Table(signatures, groups, keys, ended, tuple(worlds) or ("",), int(first))


def entry(slot: tuple[Any, ...], signatures: Sequence[Signature]) -> Entry:
    """Return the entry of a slot.

    Args:
        slot: Its fields, as ``file_format.SLOT`` unpacks them.
        signatures: Of the table.
    """
    begin, end, sequence, size_bytes, tag, peer, signature, thread, number = slot
    kind, operation, group, dtype, shape = signatures[signature]
    return Entry(
        number, kind, operation, group, sequence, dtype, shape, size_bytes, peer, tag, thread,
        begin, None if end == UNDER_WAY else abs(end), end < UNDER_WAY,
    )  # fmt: skip


def _entries(
    before: bytes, copy: bytes, after: bytes, signatures: Sequence[Signature]
) -> tuple[list[Entry], int]:
    """Return the entries by number, and the highest number of any slot."""
    found: dict[int, Entry] = {}
    newest = 0
    for slot, first, last in zip(*map(SLOT.iter_unpack, (copy, before, after)), strict=True):
        number = slot[-1]
        newest = max(newest, last[-1])
        if not number or not first[-1] == number == last[-1]:
            continue
        # An entry may be in its slot and kept for a moment; its end is in both.
        if number not in found or found[number].end_ns is None:
            found[number] = entry(slot, signatures)
    return [found[number] for number in sorted(found)], newest


def _last_start(found: list[Recording]) -> int:
    return max((recording.started_wall_ns for recording in found), default=0)
