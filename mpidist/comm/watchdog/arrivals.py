"""Arrivals of ranks at collectives: what one rank has seen of its own, and what all ranks tell.

A collective that no rank leaves before the last has come ends at about one moment on all ranks. So
the time that a rank spent in it says how long before that moment it came, and no clocks are
compared. Collectives with a root, which ranks leave early, are left out.

All ranks must choose the same collectives out of many, without asking each other: those whose
numbers are multiples of a power of two, so that the choice of one rank is part of another's.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpidist.comm.recorder.file_format import NUMBER_WORD, SLOT_WORDS, UNDER_WAY
from mpidist.comm.recorder.recording import Kind, Signature, read_table
from mpidist.comm.recorder.ring import Ring
from mpidist.comm.recorder.tail import Tail
from mpidist.comm.watchdog import stragglers

if TYPE_CHECKING:
    import numpy.typing as npt

MOST = 128  # collectives of a group that a rank tells at a time
_MOST_OF_STEP = 512  # operations in which a period is looked for
_PAIR = struct.Struct("<qq")
_WITH_ROOT = ("broadcast", "gather", "scatter", "reduce")


class Arrivals(NamedTuple):
    """Arrivals of one rank at collectives of one group.

    Attributes:
        key: Of the group, the same on all its ranks.
        label: Its name.
        size: Number of its ranks.
        step_ns: Duration of a step; 0 if it is not known.
        times: Pairs of a collective's number and the ns that the rank has spent in it, as bytes.
    """

    key: str
    label: str
    size: int
    step_ns: int
    times: bytes

    def by_number(self) -> dict[int, int]:
        """Return the ns that the rank has spent in each collective."""
        whole = len(self.times) // _PAIR.size * _PAIR.size
        return dict(_PAIR.iter_unpack(self.times[:whole]))


class OwnArrivals:
    """Arrivals of this rank, from its recorder.

    Args:
        ring: The recorder's ring.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._tail = Tail(ring)
        self._table = b""
        self._signatures: list[Signature] = []
        self._groups: dict[str, tuple[int, ...]] = {}
        self._keys: dict[str, str] = {}
        self._is_asked = np.empty(0, bool)  # by signature
        self._times: dict[str, dict[int, int]] = {}  # by label

    def look(self) -> None:
        """Take what the ring has got since the last look."""
        for slot in self._asked(self._tail.read())[-_MOST_OF_STEP:].tolist():
            begin, end, sequence = slot[:3]
            label = self._signatures[slot[5] >> 32][2]
            if end != UNDER_WAY and sequence:
                self._times.setdefault(label, {})[sequence] = abs(end) - begin

    def told(self) -> list[Arrivals]:
        """Return the arrivals since the last call, for each group."""
        told = []
        recent = self._recent()
        for label, times in self._times.items():
            members = self._groups.get(label, ())
            if len(members) > 1:
                chosen = thinned(times)
                packed = b"".join(_PAIR.pack(*pair) for pair in sorted(chosen.items()))
                step_ns = self._step_of(label, recent) or 0
                told.append(Arrivals(self._keys[label], label, len(members), step_ns, packed))
        self._times = {}
        return told

    def _recent(self) -> list[tuple[Signature, int]]:
        """Return signature and begin of the operations that the ring has, in their order."""
        rows = np.frombuffer(self._ring.copied_slots(), np.int64).reshape(-1, SLOT_WORDS)
        rows = rows[rows[:, NUMBER_WORD] > 0]
        rows = rows[np.argsort(rows[:, NUMBER_WORD])]
        self._learn()
        return [(self._signatures[row[5] >> 32], row[0]) for row in rows.tolist()]

    def _step_of(self, label: str, recent: Sequence[tuple[Signature, int]]) -> int | None:
        steps = [begin for signature, begin in recent if signature[0] is Kind.STEP]
        of_group = [
            (signature, begin)
            for signature, begin in recent
            if signature[0] is Kind.COLLECTIVE and signature[2] == label
        ][-_MOST_OF_STEP:]
        return stragglers.interval_of(steps) or stragglers.step_of(
            [signature for signature, _ in of_group], [begin for _, begin in of_group]
        )

    def _asked(self, slots: bytes) -> npt.NDArray[np.int64]:
        """Return the slots of collectives that no rank leaves early."""
        rows = np.frombuffer(slots, np.int64).reshape(-1, SLOT_WORDS)
        if len(rows):
            self._learn()
        return rows[self._is_asked[rows[:, 5] >> 32]] if len(rows) else rows

    def _learn(self) -> None:
        table = self._ring.copied_table()
        if len(table) == len(self._table):
            return
        self._table = table
        self._signatures, self._groups, self._keys = read_table(table)[:3]
        self._is_asked = np.array([_is_asked(signature) for signature in self._signatures])


def thinned(times: Mapping[int, int]) -> dict[int, int]:
    """Return at most ``MOST`` of the collectives: the multiples of a power of two."""
    chosen, stride = dict(times), 1
    while len(chosen) > MOST:
        stride *= 2
        chosen = {number: time for number, time in chosen.items() if number % stride == 0}
    return chosen


def _is_asked(signature: Signature) -> bool:
    kind, operation, *_ = signature
    has_root = operation.startswith(_WITH_ROOT) and not operation.startswith("reduce_scatter")
    return kind is Kind.COLLECTIVE and not has_root


class Finding(NamedTuple):
    """A straggler, the group in which it was found, and the step of that group."""

    straggler: stragglers.Straggler
    label: str
    step_ns: int


@dataclass
class _GroupArrivals:
    """Times of a group's ranks by collective, and by the round in which it was told first."""

    label: str = ""
    size: int = 0
    steps: dict[int, int] = field(default_factory=dict)
    times: dict[int, dict[int, int]] = field(default_factory=dict)
    rounds: dict[int, int] = field(default_factory=dict)


class AllArrivals:
    """Arrivals of all ranks, on the rank that compares them."""

    def __init__(self) -> None:
        self._groups: dict[str, _GroupArrivals] = {}
        self._round = 0
        self._named: set[int] = set()

    def add(self, rank: int, told: Sequence[Arrivals]) -> None:
        """Take what a world rank has told."""
        for one in told:
            group = self._groups.setdefault(one.key, _GroupArrivals())
            group.label, group.size = one.label, one.size
            if one.step_ns:
                group.steps[rank] = one.step_ns
            for number, time_ns in one.by_number().items():
                group.times.setdefault(number, {})[rank] = time_ns
                group.rounds.setdefault(number, self._round)

    def found(self) -> list[Finding]:
        """Return the stragglers of the last round that were not returned before."""
        findings = []
        for key, group in list(self._groups.items()):
            complete = [number for number, times in group.times.items() if len(times) == group.size]
            if len(complete) >= stragglers.LEAST_COLLECTIVES:
                step_ns = int(np.median(list(group.steps.values()))) if group.steps else None
                # The rank that has waited least came last.
                arrivals = [
                    {rank: -time_ns for rank, time_ns in group.times.pop(number).items()}
                    for number in complete
                ]
                for one in stragglers.found(arrivals, step_ns):
                    if one.rank not in self._named:
                        self._named.add(one.rank)
                        findings.append(Finding(one, group.label, step_ns or 0))
            # What a rank has not told in two rounds it has not chosen.
            for number in [n for n in group.times if group.rounds[n] < self._round - 1]:
                del group.times[number]
            group.rounds = {number: group.rounds[number] for number in group.times}
            if not group.times:
                del self._groups[key]
        self._round += 1
        return findings
