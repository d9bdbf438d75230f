"""Real text for the examples, the sources of Python's own library, and a bar that shows how far the training is."""

from __future__ import annotations

import re
import sys
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

WORD = re.compile(r"\w+|[^\w\s]|\n")
RARE = 0  # the number of all words that have none of their own


def library_text(characters: int) -> str:
    """Return the beginning of the library's modules, in the order of their names; the same on every rank."""
    text = ""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="replace")
        if len(text) >= characters:
            break
    return text[:characters]


class Words:
    """A text's most frequent words, numbered from 1.

    Attributes:
        numbers: The text's words, (N,) int64.
    """

    def __init__(self, text: str, vocabulary: int) -> None:
        found = WORD.findall(text)
        self._names = ["?", *[word for word, _ in Counter(found).most_common(vocabulary - 1)]]
        self._numbers = {word: number for number, word in enumerate(self._names) if number != RARE}
        self.numbers = torch.tensor([self._numbers.get(word, RARE) for word in found])

    def __len__(self) -> int:
        return len(self._names)

    def encode(self, text: str) -> list[int]:
        return [self._numbers.get(word, RARE) for word in WORD.findall(text)]

    def decode(self, numbers: list[int]) -> str:
        return " ".join(self._names[number].replace("\n", "\\n") for number in numbers)

    def entropy(self) -> float:
        """Return the loss of one who knows the words' frequencies and nothing else."""
        shares = torch.bincount(self.numbers).double() / len(self.numbers)
        return float(-(shares * shares.clamp(min=1e-12).log()).sum())


def progress(steps: int, title: str) -> Any:
    """Return the numbers of the steps, shown as a bar; ``set_postfix`` adds to it."""
    # mpirun hands the bar on through a pipe: there a few whole lines read better than one that is
    # rewritten.
    style = (
        {}
        if sys.stderr.isatty()
        else {"bar_format": "{l_bar}{bar:20}{r_bar}\n", "mininterval": 5.0}
    )
    return tqdm(range(steps), desc=title, unit="step", **style)
