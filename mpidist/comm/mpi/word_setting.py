"""Setting of one word, which must be the same on all ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class WordSetting(NamedTuple):
    """A variable of the environment, whose words have numbers that ranks compare.

    Attributes:
        variable: Its name.
        codes: Numbers by word, from 0; that of the empty word stands for the unset variable, too.
        meanings: Each number in words, for errors.
        choices: All words, for errors.
    """

    variable: str
    codes: Mapping[str, int]
    meanings: Sequence[str]
    choices: str

    def code(self) -> int:
        """Return this process's number; that of ``meanings`` for a word that is none."""
        return self.codes.get(self._word(), len(self.meanings))

    def problem(self, codes: Sequence[int]) -> str | None:
        """Return the error in all ranks' numbers, in rank order; None if equal and readable."""
        if len(set(codes)) == 1 and codes[0] < len(self.meanings):
            return None
        words = [*self.meanings, "another word"]
        values = [f"{words[code]} on rank {codes.index(code)}" for code in sorted(set(codes))]
        here = "" if self._word() in self.codes else f"; on this rank it is {self._word()!r}"
        return (
            f"{self.variable} must be {self.choices}, the same on all ranks; it is "
            f"{', '.join(values)}{here}"
        )

    def _word(self) -> str:
        return os.environ.get(self.variable, "")
