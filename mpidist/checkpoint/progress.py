"""Progress of a job: the highest step that is saved, noted in a file for who starts the job again.

``MPIDIST_PROGRESS`` names the file, which ``mpidist run --restarts`` and the job scripts set. A
killed job is worth another start only if a commit or checkpoint is newer than its last start. A
job that has saved and asks to be started again ends with ``REQUEUE_EXIT_CODE``.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from mpidist import whole_file

# EX_TEMPFAIL of sysexits.h: the program has saved, and a scheduler should start it again.
REQUEUE_EXIT_CODE = 75
VARIABLE = "MPIDIST_PROGRESS"
_DIGITS = 20


def note(step: int) -> None:
    """Note that a commit or checkpoint of this step is complete; on one rank.

    A file that cannot be written is a warning, because the checkpoint is complete.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return
    try:
        if step > read(Path(path)):
            with whole_file.replacing(Path(path)) as file:
                file.write(f"{step}\n".encode())
    except OSError as error:
        warnings.warn(f"step {step} cannot be noted in {VARIABLE}: {error}", stacklevel=3)


def read(path: Path) -> int:
    """Return the highest step that was noted; -1 for none."""
    try:
        with open(path, "rb") as file:
            text = file.read(_DIGITS)
    except FileNotFoundError:
        return -1
    return int(text) if text.strip().isdigit() else -1
