"""Runnable code blocks of the documentation, after ``<!-- run -->`` or ``<!-- run: RANKS -->``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.tools.support import ROOT

_RUN = re.compile(
    r"^ *<!-- run(?:: (?P<ranks>\d+))? -->\n+(?P<indent> *)```python[^\n]*\n(?P<code>.*?)^ *```$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Example:
    """Program of a page.

    Attributes:
        page: Path of the page in the repository.
        line: Number of the program's first line.
        ranks: Smallest number of ranks.
        code: Text of the program.
    """

    page: str
    line: int
    ranks: int
    code: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def examples_of(text: str, page: str) -> list[Example]:
    """Return the marked blocks of a page in order."""
    found = []
    for match in _RUN.finditer(text):
        width = len(match["indent"])
        code = "\n".join(line[width:] for line in match["code"].splitlines())
        line = text.count("\n", 0, match.start("code")) + 1
        found.append(Example(page, line, int(match["ranks"] or 1), code))
    return found


def all_examples() -> list[Example]:
    """Return the marked blocks of all pages."""
    pages = sorted(Path(ROOT, "docs").rglob("*.md"))
    return [
        one
        for page in pages
        for one in examples_of(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)))
    ]
