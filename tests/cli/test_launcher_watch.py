"""Watch over a launcher: one that stays without a process is killed, another is left alone."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from mpidist.cli import launch_plan, launcher_watch, run
from mpidist.cli.launch_request import Request, has_children

pytestmark = pytest.mark.slow

_LAUNCHER = """
import subprocess, sys, time
input()
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3)"])
# It reaps no rank: a dead one stays a zombie. With STATUS it ends before its rank.
time.sleep(1 if STATUS else 1000)
sys.exit(STATUS)
"""


def launched(status):
    text = _LAUNCHER.replace("STATUS", str(status))
    process = subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE)
    launcher_watch.start(process.pid, 0.1)
    # The watch is no child of the launcher.
    assert launcher_watch.children(process.pid) == []
    process.stdin.write(b"\n")
    process.stdin.close()
    return process.wait(60)


def test_a_launcher_without_a_process_is_killed(monkeypatch, capfd):
    monkeypatch.setattr(launcher_watch, "_POLL_S", 0.05)
    assert launched(0) == -signal.SIGKILL
    text = "all processes of the job are gone, and its launcher has not ended 0.1 s later"
    assert text in capfd.readouterr()[1]


def test_a_launcher_with_a_process_is_left_alone(monkeypatch, capfd):
    monkeypatch.setattr(launcher_watch, "_POLL_S", 0.05)
    assert launched(7) == 7
    assert "launcher" not in capfd.readouterr()[1]


_WAITING = """
import subprocess, sys
input()
subprocess.run([sys.executable, "-c", "import time; time.sleep(2)"])
sys.exit(7)
"""


def test_a_stopped_launcher_is_left_alone(monkeypatch):
    monkeypatch.setattr(launcher_watch, "_POLL_S", 0.05)
    process = subprocess.Popen([sys.executable, "-c", _WAITING], stdin=subprocess.PIPE)
    launcher_watch.start(process.pid, 0.1)
    process.stdin.write(b"\n")
    process.stdin.close()
    while not launcher_watch.children(process.pid):
        time.sleep(0.01)
    process.send_signal(signal.SIGSTOP)
    while launcher_watch.children(process.pid):
        time.sleep(0.01)
    time.sleep(0.5)
    process.send_signal(signal.SIGCONT)
    assert process.wait(60) == 7


def test_a_reader_that_takes_no_output_is_waited_for(monkeypatch):
    reads, writes = os.pipe()
    monkeypatch.setattr(launcher_watch, "_OUTPUTS", (writes,))
    assert not launcher_watch._is_output_blocked()
    os.set_blocking(writes, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writes, bytes(1 << 16))
    assert launcher_watch._is_output_blocked()
    # Nobody reads any more: the launcher cannot wait for it.
    os.close(reads)
    assert not launcher_watch._is_output_blocked()
    os.close(writes)


def test_jobs_that_outlive_ranks_are_watched(monkeypatch):
    watched, planned = [], launch_plan.Plan(("mpirun",), {})
    monkeypatch.setattr(run, "plan", lambda *args: planned)
    monkeypatch.setattr(run, "site", lambda environ: None)
    monkeypatch.setattr(run, "become", lambda found, is_dry: watched.append(is_dry))
    monkeypatch.setattr(launcher_watch, "start", watched.append)
    for request, is_dry in (
        (Request((), ulfm=True), False),
        (Request((), ulfm=True), True),
        (Request(()), False),
        # The ranks of other nodes are no children of the launcher.
        (Request((), ulfm=True, hosts=("a", "b")), False),
    ):
        run.start(request, is_dry)
    assert watched == [os.getpid(), False, True, False, False]


def test_a_launcher_whose_ranks_may_be_no_children_of_it_is_not_watched():
    assert has_children(Request(()), {})
    assert has_children(Request(()), {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"})
    for request in (Request((), hosts=("a",)), Request((), hostfile="nodes")):
        assert not has_children(request, {})
    assert not has_children(Request(()), {"PBS_NODEFILE": "nodes"})
