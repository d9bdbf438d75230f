"""Timer that ends the process."""

import subprocess
import sys
import time

from mpidist.comm.mpi import exit_timer

# The function holds Python's lock: the timer must not need it.
_HANGS = """
import ctypes
from mpidist.comm.mpi import exit_timer
with exit_timer.exiting_after(0.2, 7):
    ctypes.PyDLL(None).sleep(20)
"""


def test_a_block_in_time_and_one_that_hangs():
    with exit_timer.exiting_after(0.1, 3):
        pass
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", _HANGS], timeout=60, check=False)
    assert done.returncode == 7
    assert time.monotonic() - begin < 15
