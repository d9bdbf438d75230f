"""Tail of this process's ring: entries since a moment, in the form in which the ring has them.

The ring forgets; whoever needs all entries of a time reads the tail before the ring has come
around. A copy of the slots is one step of the interpreter, in which no other thread stores, so the
reader takes no lock, and the threads that record wait for no more than that copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from mpidist.comm.recorder.file_format import END_WORD, NUMBER_WORD, SLOT_WORDS, UNDER_WAY
from mpidist.comm.recorder.ring import Ring

if TYPE_CHECKING:
    import numpy.typing as npt

_Rows: TypeAlias = "npt.NDArray[np.int64]"


class Tail:
    """Entries that begin after this object was made.

    One thread at a time reads it.

    Args:
        ring: This process's ring.

    Attributes:
        lost: Number of entries that were overwritten before they were read.
        missing: Number of entries that no slot has: their threads are about to store them, or a
            thread that was switched off between its number and its store has overwritten them. They
            are lost if nobody records any more.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._last = int(self._rows()[:, NUMBER_WORD].max(initial=0))
        # Numbers up to the last that were under way, or still being stored.
        self._awaited = np.empty(0, np.int64)
        self._under_way = np.empty((0, SLOT_WORDS), np.int64)
        self.lost = self.missing = 0

    def read(self) -> bytes:
        """Return the slots of the entries that have ended since the last call, in any order."""
        rows = self._rows()
        numbers = rows[:, NUMBER_WORD]
        newest = max(int(numbers.max(initial=0)), self._last)
        expected = np.concatenate([self._awaited, np.arange(self._last + 1, newest + 1)])
        # An entry under way may be in its slot and kept; then the one that has ended counts.
        rows = rows[np.isin(numbers, expected)]
        rows = rows[np.argsort(rows[:, END_WORD] == UNDER_WAY, kind="stable")]
        _, first = np.unique(rows[:, NUMBER_WORD], return_index=True)
        rows = rows[first]
        is_over = rows[:, END_WORD] != UNDER_WAY
        self._under_way = rows[~is_over]
        missing = np.setdiff1d(expected, rows[:, NUMBER_WORD], assume_unique=True)
        # A number that is not there yet is being stored, unless a later one has its slot.
        is_lost = missing <= newest - self._ring.slots
        self.lost += int(is_lost.sum())
        self.missing = len(missing) - int(is_lost.sum())
        self._awaited = np.concatenate([self._under_way[:, NUMBER_WORD], missing[~is_lost]])
        self._last = newest
        return rows[is_over].tobytes()

    def under_way(self) -> bytes:
        """Return the slots of the entries that had not ended at the last ``read``."""
        return self._under_way.tobytes()

    @property
    def last(self) -> int:
        """Return the number of the newest entry that was read."""
        return self._last

    def _rows(self) -> _Rows:
        copy = self._ring.copied_slots()
        return np.frombuffer(copy, np.int64).reshape(-1, SLOT_WORDS)
