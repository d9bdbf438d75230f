"""The watcher of a start: silent where it ends well, heard where it hangs or dies."""

import subprocess
import sys

import pytest

from mpidist.cli.deadline import deadline


def test_a_block_that_ends_or_raises_is_no_matter(capfd):
    with deadline(60, "late", "died"):
        pass
    with pytest.raises(ValueError, match="mine"), deadline(60, "late", "died"):
        raise ValueError("mine")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [("os.kill(os.getpid(), 19)", -9, "late"), ("os._exit(5)", 5, "died")],
)
def test_a_block_that_hangs_or_dies_is_told(body, status, word):
    """The stopped process stands for one that hangs in a library, with Python's lock."""
    script = (
        "import os\nfrom mpidist.cli.deadline import deadline\nwith deadline(0.5, 'late', "
        f"'died'):\n    {body}"
    )
    # The watcher holds stderr until it has written.
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (status, f"{word}\n")
