"""Processes that count as dead and have not ended, on this node; jobs are in test_recovery."""

import os
import signal
import subprocess
import sys

from mpidist.comm.mpi.process_start import start_ticks
from mpidist.elastic import neighbours
from mpidist.elastic.neighbours import Neighbours


class Others:
    """Processes of a job beside this one, by the rows that they give."""

    def __init__(self, *rows):
        self.rows = rows

    def gather(self, row):
        return [row, *self.rows]


def test_a_stopped_process_is_killed_and_no_other_one():
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    children = [subprocess.Popen(words) for _ in range(4)]
    try:
        for child in children:
            os.kill(child.pid, signal.SIGSTOP)
        rows = [[child.pid, start_ticks(child.pid), neighbours._node()] for child in children]
        rows[1][1] += 1  # another process had this number
        rows[2][2] += 1  # of another node
        found = Neighbours(Others(*rows))
        found.end([0, 1, 2, 3, 7])
        found.end([1])
        assert children[0].wait(60) == -signal.SIGKILL
        assert [child.poll() for child in children[1:]] == [None] * 3
        assert start_ticks(children[0].pid) == 0
    finally:
        for child in children:
            child.kill()
            child.wait()
