"""A row of docs/torch-versions.md from the outputs of pytest at one and at two processes."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

import torch


def result(output: str) -> str:
    """Return the counts in the last summary of pytest, as "12 passed, 3 skipped"."""
    summaries = re.findall(r"^=* ?((?:\d+ \w+, )*\d+ \w+) in [\d.]+s", output, re.MULTILINE)
    if not summaries:
        return "ended without a result"
    told = re.findall(r"\d+ (?:passed|failed|skipped|errors?)\b", summaries[-1])
    return ", ".join(told)


if __name__ == "__main__":
    results = [result(Path(path).read_text(encoding="utf-8")) for path in sys.argv[1:]]
    print("|", " | ".join([torch.__version__, platform.python_version(), *results]), "|")
