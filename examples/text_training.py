"""Real text for the examples, the sources of Python's own library, and a bar that shows how far the training is."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

from tqdm import tqdm


def library_text(characters: int) -> str:
    """Return the beginning of the library's modules, in the order of their names; the same on every rank."""
    text = ""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="replace")
        if len(text) >= characters:
            break
    return text[:characters]


def progress(steps: int, title: str) -> Any:
    """Return the numbers of the steps, shown as a bar; ``set_postfix`` adds to it."""
    # mpirun hands the bar on through a pipe: there a few whole lines read better than one that is rewritten.
    style = {} if sys.stderr.isatty() else {"bar_format": "{l_bar}{bar:20}{r_bar}\n", "mininterval": 5.0}
    return tqdm(range(steps), desc=title, unit="step", **style)
