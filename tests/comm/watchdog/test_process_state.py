"""State of a process as this host's kernel has it."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpidist.comm.mpi.world import Process
from mpidist.comm.watchdog import process_state

HOST = socket.gethostname()

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")


def awaited(process, part):
    """Return the words on a process once they contain a part."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        words = process_state.words(Process(process.pid, HOST), HOST)
        if part in words:
            return words
        time.sleep(0.001)
    raise AssertionError(words)


def test_a_process_is_said_to_wait_to_be_stopped_killed_and_gone():
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert "it waits in a call" in awaited(process, "waits")
        process.send_signal(signal.SIGSTOP)
        assert awaited(process, "stopped") == f"it is stopped: kill -CONT {process.pid}"
        process.kill()
        # Its status has not been asked for yet.
        assert awaited(process, "killed") == "it was killed by signal 9 (SIGKILL)"
    finally:
        process.kill()
        process.wait()
    assert f"it has ended: no process {process.pid} on {HOST}" in awaited(process, "ended")


def test_a_process_that_exits_was_not_killed():
    process = subprocess.Popen(["true"])
    try:
        assert awaited(process, "ended") == "it has ended"
    finally:
        process.wait()


def test_a_process_elsewhere_or_without_a_kernels_word_has_none(monkeypatch, tmp_path):
    assert process_state.words(Process(os.getpid(), "elsewhere"), HOST) == ""
    assert "it computes" in process_state.words(Process(os.getpid(), HOST), HOST)
    monkeypatch.setattr(process_state, "_PROC", tmp_path)
    assert process_state.words(Process(os.getpid(), HOST), HOST) == ""


def test_a_status_without_a_name_is_a_number(monkeypatch, tmp_path):
    for name in ("self", "7"):
        (tmp_path / name).mkdir()
        fields = ["0"] * 48 + ["34" if name == "7" else "0"]
        (tmp_path / name / "stat").write_text(f"7 (a (b) c) Z {' '.join(fields)}\n")
    monkeypatch.setattr(process_state, "_PROC", tmp_path)
    said = process_state.words(Process(7, HOST), HOST)
    assert said.startswith("it was killed by signal 34 (") and sys.platform == "linux"
