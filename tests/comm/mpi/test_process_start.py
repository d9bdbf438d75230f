"""Start of a process."""

import os
import subprocess
import sys

from mpidist.comm.mpi.process_start import start_ticks


def test_a_process_has_one_start_until_it_has_ended():
    own = start_ticks(os.getpid())
    assert own == start_ticks(os.getpid()) > 0
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert start_ticks(child.pid) >= own
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert start_ticks(child.pid) == 0  # it waits for its parent
    child.communicate()
    assert start_ticks(child.pid) == 0
