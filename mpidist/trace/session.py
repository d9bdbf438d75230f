"""Recording of a timeline: begin and end, the same for a context and for a whole program.

At the begin the ranks measure their clocks against rank 0's, and each starts a spool of its
entries. At the end they measure again, and rank 0 receives the spools one after the other, and
writes their slices as they come. A rank that cannot take part in the end, because its program left
the context by an exception, writes a file of its own slices alone, which ``merge`` puts together.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from mpidist import whole_file
from mpidist.comm.execution.group_state import open_groups
from mpidist.comm.mpi import rank_ranges
from mpidist.comm.recorder import recorder
from mpidist.comm.recorder.file_format import SLOT
from mpidist.comm.recorder.recording import entry, read_table
from mpidist.comm.recorder.ring import Ring
from mpidist.errors import DisagreementError, MpidistError
from mpidist.trace import chrome_file
from mpidist.trace.arrows import Arrows, Group
from mpidist.trace.clocks import Clock, Offset
from mpidist.trace.events import SliceTexts, Tracks, arrow
from mpidist.trace.exchange import Exchange
from mpidist.trace.spool import Spool

VERSION = 1
_LENGTHS = struct.Struct("<qqq")

_log = logging.getLogger(__name__)
# Files that this rank has written alone.
_alone: Counter[Path] = Counter()


class _Start(NamedTuple):
    """Begin of a trace on rank 0, which all ranks know: its name, and the zero of its times."""

    name: str
    zero_ns: int


class _Moment(NamedTuple):
    """One moment on both clocks of this rank, and the offset to rank 0's monotonic clock."""

    wall_ns: int
    monotonic_ns: int
    offset: Offset

    @classmethod
    def now(cls, offset: Offset) -> _Moment:
        """Return this moment."""
        return cls(time.time_ns(), time.monotonic_ns(), offset)


class Part(NamedTuple):
    """Recording of one rank.

    Attributes:
        about: Facts of the rank.
        table: Signatures and groups.
        slots: Entries.
    """

    about: dict[str, Any]
    table: bytes
    slots: bytes


class Session:
    """A trace that is being recorded.

    Collective: over the world's ranks.

    Args:
        path: The file; rank 0 writes it, by gzip if it ends in ``.gz``.

    Raises:
        OSError: The file cannot be written (all ranks).
        DisagreementError: The ranks name different files (all ranks).
        MpidistError: A rank records nothing, because ``MPIDIST_RECORDER`` is 0 (all ranks).
        CommTimeout, RankFailureError: A rank did not come, or has ended.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._name, self.path = os.fspath(path), _absolute(Path(path))
        self._exchange = exchange = Exchange()
        ring = recorder.of_process()
        self._ring = ring if isinstance(ring, Ring) else None
        try:
            with exchange.explaining():
                self._require_alike(exchange)
                self._first = _Moment.now(exchange.offset())
                own = json.dumps([uuid.uuid4().hex, self._first.monotonic_ns])
                self._start = _Start(*json.loads(exchange.strings(own)[0]))
        except Exception:
            exchange.close()
            raise
        assert self._ring is not None
        self._table = b""
        self._spool = Spool(self._ring)

    def end(self, may_have_left: bool = False) -> None:
        """Write the file. Collective: over the world's ranks.

        Args:
            may_have_left: The programs of other ranks may have ended already.

        Raises:
            OSError: Rank 0 cannot write the file (all ranks).
            CommTimeout, RankFailureError: A rank did not come, or has ended. This rank has written
                a file of its own entries.
        """
        exchange = self._exchange
        slots = self._ended()
        try:
            with exchange.explaining():
                exchange.meet(may_have_left)
                last = _Moment.now(exchange.offset())
                problem = self._written_by_root(exchange, slots, last)
                problem = exchange.strings(problem)[0]
        except Exception:
            # The communicator is lost: it has a barrier that not all ranks have entered.
            self._write_alone(slots)
            raise
        exchange.close()
        if problem:
            raise OSError(problem)

    def abandon(self) -> None:
        """Write a file of this rank's entries alone. Not collective; called in place of ``end``."""
        self._write_alone(self._ended())
        self._exchange.close()

    def _require_alike(self, exchange: Exchange) -> None:
        problem = whole_file.problem_of(self.path) if exchange.rank == 0 else ""
        told = json.dumps([self._name, problem, self._ring is not None])
        paths, problems, are_recorded = zip(*map(json.loads, exchange.strings(told)), strict=True)
        where = f"rank {exchange.rank} of {exchange.size}: trace"
        if not all(are_recorded):
            ranks = [rank for rank, is_recorded in enumerate(are_recorded) if not is_recorded]
            raise MpidistError(
                f"{where} needs the recorder on all ranks, and it is off on "
                f"{rank_ranges.named(ranks)} (MPIDIST_RECORDER=0)"
            )
        if len(set(paths)) > 1:
            raise DisagreementError(
                f"{where} needs one file, which rank 0 writes; the ranks name "
                f"{', '.join(sorted(set(paths)))}"
            )
        if problems[0]:
            raise OSError(f"{where} cannot be written by rank 0: {problems[0]}")

    def _ended(self) -> bytes:
        """End the spool; return its slots."""
        assert self._ring is not None
        slots, self._table = self._spool.end(), self._ring.copied_table()
        return slots

    def _written_by_root(self, exchange: Exchange, slots: bytes, last: _Moment) -> str:
        """Write the file on rank 0, send this rank's part on the others; return the problem."""
        part = self._part(slots, last)
        abouts = [json.loads(text) for text in exchange.at_root(json.dumps(part.about).encode())]
        lengths = exchange.at_root(_LENGTHS.pack(len(part.table), len(part.slots), 0))
        if exchange.rank:
            exchange.send(memoryview(part.table))
            exchange.send(memoryview(part.slots))
            return ""

        def parts() -> Iterator[Part]:
            yield part
            for rank in range(1, exchange.size):
                table, rows, _ = _LENGTHS.unpack(lengths[rank])
                yield Part(
                    abouts[rank], exchange.receive(rank, table), exchange.receive(rank, rows)
                )

        received = parts()
        duration_ns = time.monotonic_ns() - self._start.zero_ns
        try:
            remarks = write(self.path, self._facts(abouts, exchange.size, duration_ns), received)
        except OSError as error:
            # The others send their parts all the same.
            for _ in received:
                pass
            return f"rank 0 cannot write the trace {self.path}: {error.strerror or error}"
        for remark in remarks:
            _log.warning("%s", remark)
        error_us = max(about["clock_error_us"] for about in abouts)
        _log.info(
            "trace of %d ranks in %s; its times are right to %.1f us",
            exchange.size, self.path, error_us,
        )  # fmt: skip
        return ""

    def _write_alone(self, slots: bytes) -> None:
        exchange, first = self._exchange, self._first
        # Without the other ranks the offset of the begin must do.
        last = _Moment.now(first.offset)
        part = self._part(slots, last)
        path = alone(self.path, exchange.rank)
        # In the world after this one the rank may have another part of the same trace.
        _alone[path] += 1
        if _alone[path] > 1:
            path = alone(self.path, exchange.rank, _alone[path])
        duration_ns = first.offset.offset_ns + last.monotonic_ns - self._start.zero_ns
        try:
            write(path, self._facts([part.about], exchange.size, duration_ns), [part])
        except OSError as error:
            _log.warning("rank %d cannot write %s: %s", exchange.rank, path, error)
            return
        _log.warning(
            "rank %d left the trace before its end: its own part is in %s (mpidist trace merge)",
            exchange.rank, path,
        )  # fmt: skip

    def _part(self, slots: bytes, last: _Moment) -> Part:
        first = self._first
        clock = Clock(first.offset, last.offset)
        common, zero = clock.common(), self._start.zero_ns
        _, groups, keys = read_table(self._table)[:3]
        about = {
            "rank": self._exchange.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "lost": self._spool.lost,
            "problem": self._spool.problem,
            "groups": {label: [keys[label], list(members)] for label, members in groups.items()},
            "clock": [list(first.offset), list(last.offset)],
            "clock_error_us": clock.error_ns / 1e3,
            "clock_jumped": clock.has_jumped,
            "wall": [
                [moment.wall_ns, common(moment.monotonic_ns) - zero] for moment in (first, last)
            ],
            "threads": {str(thread): name for thread, name in self._spool.threads.items()},
            "main_thread": threading.main_thread().native_id,
            "tuning": _tuning(),
        }
        return Part(about, self._table, slots)

    def _facts(self, abouts: list[dict[str, Any]], size: int, duration_ns: int) -> dict[str, Any]:
        return {
            "version": VERSION,
            "trace": self._start.name,
            "size": size,
            "zero_ns": self._start.zero_ns,
            "duration_us": duration_ns / 1e3,
            "ranks": abouts,
            "tuning": abouts[0]["tuning"],
        }


def _absolute(path: Path) -> Path:
    """Return a path that stays when the program changes its folder before the end."""
    try:
        return path.absolute()
    except OSError:
        return path  # the folder of this process was removed, which rank 0 finds in its check


def alone(path: Path, rank: int, number: int = 1) -> Path:
    """Return the file that one rank writes: ``run.json.gz`` becomes ``run-rank3.json.gz``.

    Its second one, of a later world, is ``run-rank3-2.json.gz``.
    """
    suffix = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    again = f"-{number}" if number > 1 else ""
    return path.with_name(f"{path.name.removesuffix(suffix)}-rank{rank}{again}{suffix}")


def write(path: Path, facts: dict[str, Any], parts: Iterable[Part]) -> list[str]:
    """Write a trace file; return remarks.

    Args:
        path: Of the file.
        facts: Of the trace; the groups of its ranks become numbers.
        parts: Of the ranks, in the order of the facts; each is taken once.

    Raises:
        OSError: It cannot be written.
    """
    numbers: dict[Group, int] = {}
    groups: list[dict[str, Group]] = []
    for about in facts["ranks"]:
        of_rank = {
            label: Group(key, tuple(members)) for label, (key, members) in about["groups"].items()
        }
        groups.append(of_rank)
        about["groups"] = {
            label: numbers.setdefault(group, len(numbers)) for label, group in of_rank.items()
        }
    facts = {**facts, "groups": [[key, list(members)] for key, members in numbers]}
    remarks = []
    with chrome_file.written(path) as file:
        file.begin({"mpidist": facts})
        file.write(_events(facts, groups, parts))
    for about in facts["ranks"]:
        rank = about["rank"]
        if about["lost"]:
            remarks.append(
                f"the trace lacks {about['lost']} entries of rank {rank}, which were overwritten "
                "before they were read: a larger MPIDIST_RECORDER keeps more"
            )
        if about["problem"]:
            remarks.append(f"the trace lacks entries of rank {rank}: {about['problem']}")
        if about["clock_jumped"]:
            remarks.append(
                f"the clock of rank {rank} has jumped during the trace: its times may be wrong by "
                f"{about['clock_error_us']:.0f} us"
            )
    return remarks


def _events(
    facts: dict[str, Any], groups: list[dict[str, Group]], parts: Iterable[Part]
) -> Iterator[str]:
    error_ns = max(int(about["clock_error_us"] * 2e3) for about in facts["ranks"])
    arrows, number, none = Arrows(error_ns), count(1), Group()
    end_ns = facts["zero_ns"] + int(facts["duration_us"] * 1e3)
    for part, known in zip(parts, groups, strict=True):
        about = part.about
        rank = about["rank"]
        signatures = read_table(part.table).signatures
        entries = [entry(slot, signatures) for slot in SLOT.iter_unpack(part.slots)]
        tracks, texts = Tracks(rank), SliceTexts(rank)
        slices = list(
            tracks.placed(
                entries,
                _common(about),
                facts["zero_ns"],
                end_ns,
                {int(thread): name for thread, name in about["threads"].items()},
                about["main_thread"],
            )
        )
        yield from tracks.described(about["host"])
        for placed in slices:
            yield texts.of(placed)
            for one in arrows.add(rank, placed, known.get(placed.entry.group, none)):
                yield from arrow(next(number), *one)
    for one in arrows.rest():
        yield from arrow(next(number), *one)


def _common(about: dict[str, Any]) -> Callable[[int], int]:
    first, last = (Offset(*offset) for offset in about["clock"])
    return Clock(first, last).common()


def _tuning() -> list[list[object]]:
    """Return size and fastest all-reduce of each row of a measured table that a group uses."""
    for group in open_groups():
        for table in list(group.comm.tuning_tables.values()):
            if not table.source.startswith("unmeasured"):
                return [[size, ranking[0]] for size, ranking in table.rows]
    return []
