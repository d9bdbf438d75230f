"""Deadline of a block: silent on success, with a message after a hang or a death."""

import subprocess
import sys

import pytest

from mpidist.cli.deadline import deadline


def test_a_block_that_ends_or_raises_prints_nothing(capfd):
    with deadline(60, "late", "died"):
        pass
    with pytest.raises(ValueError, match="mine"), deadline(60, "late", "died"):
        raise ValueError("mine")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [("os.kill(os.getpid(), 19)", -9, "late"), ("os._exit(5)", 5, "died")],
)
def test_a_block_that_hangs_or_dies_is_reported(body, status, word):
    """A stopped process simulates one that hangs in a library with the GIL held."""
    script = (
        "import os\nfrom mpidist.cli.deadline import deadline\nwith deadline(0.5, 'late', "
        f"'died'):\n    {body}"
    )
    # The watcher keeps stderr open until its message is written.
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (status, f"{word}\n")
