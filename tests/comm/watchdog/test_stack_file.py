"""The file of stacks: the signal, the table of threads, handlers of the program."""

import faulthandler
import os
import signal
import subprocess
import sys
import threading

import pytest

from mpidist.comm.watchdog import thread_stacks
from mpidist.comm.watchdog.dump_signal import DumpSignal
from mpidist.comm.watchdog.stack_file import StackFile
from tests.tools.support import ROOT


@pytest.fixture(autouse=True)
def _restored():
    handler, descriptor = signal.getsignal(signal.SIGUSR2), signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    yield
    faulthandler.unregister(signal.SIGUSR2)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGUSR2, handler)
    signal.set_wakeup_fd(descriptor)


def asked():
    os.kill(os.getpid(), signal.SIGUSR2)


def test_the_signal_writes_stacks_and_the_watchdog_its_table(tmp_path):
    request, file = DumpSignal(), StackFile(tmp_path / "stacks-0")
    file.serve()
    assert file.is_installed and file.path.read_text() == ""
    assert file.path.stat().st_mode & 0o777 == 0o600
    asked()
    assert request.has_arrived() and not thread_stacks.has_table(file.path.read_text())
    file.serve()
    file.serve()
    text = file.path.read_text()
    assert thread_stacks.has_table(text) and text.count("# end") == 1
    (main,) = (each for each in thread_stacks.parsed(text) if each.name == "MainThread")
    assert main.thread == threading.get_native_id() and main.lines[0].function == "asked"
    # A reader empties it, and asks at once: the same text as before.
    os.truncate(file.path, 0)
    asked()
    file.serve()
    assert "# end" not in file.path.read_text()
    file.serve()
    assert file.path.read_text().count("# end") == 1


def test_a_handler_of_the_program_is_called_before_and_after(tmp_path):
    seen = []
    signal.signal(signal.SIGUSR2, lambda number, frame: seen.append("early"))
    file = StackFile(tmp_path / "stacks-0")
    asked()
    assert seen == ["early"] and "in asked" in file.path.read_text()
    signal.signal(signal.SIGUSR2, lambda number, frame: seen.append("late"))
    file.serve()
    os.truncate(file.path, 0)
    asked()
    assert seen == ["early", "late"] and "in asked" in file.path.read_text()


def test_without_a_handler_of_python_the_process_lives(tmp_path):
    file = StackFile(tmp_path / "stacks-0")
    asked()
    assert "in asked" in file.path.read_text()


def test_a_file_of_the_next_world_takes_the_signal(tmp_path):
    signal.signal(signal.SIGUSR2, lambda number, frame: None)
    first = StackFile(tmp_path / "stacks-0")
    signal.signal(signal.SIGUSR2, signal.getsignal(signal.SIGUSR2))  # faulthandler's is gone
    second = StackFile(tmp_path / "stacks-1")
    asked()
    assert first.path.read_text() == "" and "in asked" in second.path.read_text()


def test_a_report_writes_it_anew(tmp_path):
    file = StackFile(tmp_path / "stacks-0")
    file.write()
    file.write()
    assert file.path.read_text().count("# end") == 1


def test_other_threads_and_folders_that_are_not_there_install_nothing(tmp_path):
    made = [StackFile(tmp_path / "none" / "stacks-0")]
    thread = threading.Thread(target=lambda: made.append(StackFile(tmp_path / "stacks-0")))
    thread.start()
    thread.join()
    for file in made:
        file.serve()
        file.write()
    assert not any(file.is_installed for file in made) and not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def handler_of_program(number, frame):
    os._exit(7)


# What the process has for the signal before and after its file is installed, and how a forked child
# ends that receives it.
@pytest.mark.parametrize(
    ("before", "after", "ends"),
    [
        (signal.SIG_DFL, None, 0),
        (handler_of_program, None, 7),
        (signal.SIG_DFL, handler_of_program, 7),
    ],
)
def test_a_forked_child_writes_nothing_into_its_parents_file(tmp_path, before, after, ends):
    signal.signal(signal.SIGUSR2, before)
    file = StackFile(tmp_path / "stacks-0")
    if after is not None:
        signal.signal(signal.SIGUSR2, after)
    child = os.fork()
    if child == 0:
        ended = 1
        try:
            asked()
            file.serve()
            file.write()
            ended = int(file.is_installed)
        finally:
            os._exit(ended)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == ends
    assert file.is_installed and file.path.read_text() == ""
    file.write()
    assert thread_stacks.has_table(file.path.read_text())


def test_a_thread_that_keeps_pythons_lock_does_not_delay_it(tmp_path):
    code = """
import ctypes, os, signal, sys
from pathlib import Path
from mpidist.comm.watchdog.stack_file import StackFile
file = StackFile(Path(sys.argv[1]))
libc = ctypes.PyDLL(None)  # keeps the lock
if os.fork() == 0:
    os.execvp("sh", ["sh", "-c", f"sleep 0.2; kill -USR2 {os.getppid()}"])
libc.usleep(500_000)
print(file.path.read_text().count("most recent call first"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "stacks-0")],
        capture_output=True, text=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert done.stdout == "1\n", done.stderr
