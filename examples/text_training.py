"""Text and progress bar of the examples; the text is the source code of Python's library."""

from __future__ import annotations

import argparse
import re
import sys
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from command_line import positive
from tqdm import tqdm

WORD = re.compile(r"\w+|[^\w\s]|\n")
RARE = 0  # number of all other words


def add_characters(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--characters``, the length of the text."""
    text = "so much of the sources of Python's library"
    parser.add_argument("--characters", type=positive, default=1_000_000, help=text)


def library_text(characters: int) -> str:
    """Return the first library modules by name; the text is equal on all ranks."""
    text = ""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="replace")
        if len(text) >= characters:
            break
    return text[:characters]


class Words:
    """Most frequent words of a text, numbered from 1.

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
        """Return the loss of a model that knows only the words' frequencies."""
        shares = torch.bincount(self.numbers).double() / len(self.numbers)
        return float(-(shares * shares.clamp(min=1e-12).log()).sum())


def progress(steps: int, title: str) -> Any:
    """Return the numbers of the steps with a progress bar; ``set_postfix`` adds text."""
    # mpirun forwards the bar through a pipe, where a few whole lines read better than rewritten
    # ones.
    style = (
        {}
        if sys.stderr.isatty()
        else {"bar_format": "{l_bar}{bar:20}{r_bar}\n", "mininterval": 5.0}
    )
    return tqdm(range(steps), desc=title, unit="step", **style)
