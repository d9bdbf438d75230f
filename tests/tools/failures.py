"""Failures of a run of several stages: recorded by each stage, and printed at the end.

``make test`` and ``make test-all`` go on behind a stage that has failed. A stage that runs tests
loads ``tests.tools.instant_failures``, which records each failed test; the Makefile records a stage
that ended with a status other than 0, which may have named no test: a linter, a crash, a hang.
``python -m tests.tools.failures FILE`` prints the command that repeats each, and what went wrong.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

FILE, STAGE = "MPIDIST_FAILURES", "MPIDIST_STAGE"
_REASON = 200  # characters of a reason


def record(path: str | None, test: str, reason: str) -> None:
    """Append a failed test of this stage to a run's file.

    Args:
        path: The file; None without a run.
        test: Its node id.
        reason: Text of the failure; the beginning of its last line is kept.
    """
    if path:
        last = reason.strip().split("\n")[-1][:_REASON]
        line = json.dumps([os.environ.get(STAGE, "unit"), test, last])
        # One write, because ranks append at the same time.
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def summary(lines: Iterable[str]) -> list[str]:
    """Return a line for each failure: the command that repeats it, and the reason.

    Args:
        lines: The file's: a list in JSON for a test, or the name of a stage that failed.
    """
    reasons: dict[tuple[str, str], str] = {}
    stages: dict[str, None] = {}
    for line in lines:
        if line.startswith("["):
            stage, test, reason = json.loads(line)
            # The first rank that fails has the reason; the others may fail of it.
            reasons.setdefault((stage, test), reason)
        else:
            stages[line.strip()] = None
    explained = {stage for stage, _ in reasons}
    found = [
        f"make {stage} {shlex.quote('TESTS=' + shlex.quote(test).replace('$', '$$'))}  # {reason}"
        for (stage, test), reason in reasons.items()
    ]
    found += [f"make {stage}" for stage in stages if stage not in explained]
    return found


def main(path: str) -> None:
    """Print the failures of a run, if there are any."""
    file = Path(path)
    found = summary(file.read_text(encoding="utf-8").splitlines()) if file.exists() else []
    if found:
        print(f"\nfailed: {len(found)}; each again by", *found, sep="\n    ")


if __name__ == "__main__":
    main(sys.argv[1])
