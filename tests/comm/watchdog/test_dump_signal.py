"""The request for a flight record by SIGUSR2."""

import asyncio
import os
import signal
import subprocess
import sys
import threading

import pytest

from mpidist.comm.watchdog.dump_signal import DumpSignal
from tests.tools.support import ROOT


@pytest.fixture(autouse=True)
def _restored():
    handler, descriptor = signal.getsignal(signal.SIGUSR2), signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    yield
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGUSR2, handler)
    signal.set_wakeup_fd(descriptor)


def test_a_signal_arrives_once():
    made = DumpSignal()
    assert made.is_installed and not made.has_arrived()
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert made.has_arrived() and not made.has_arrived()


def test_interrupts_are_counted_while_the_user_handles_them():
    made, seen = DumpSignal(), []
    former = {
        number: signal.signal(number, lambda number, frame: seen.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        assert not made.has_arrived() and made.interrupts == 0
        for number in former:
            os.kill(os.getpid(), number)
        assert not made.has_arrived() and made.interrupts == 1
        assert not made.has_arrived() and made.interrupts == 1 and seen == list(former)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def test_a_handler_of_the_user_stays():
    seen = []
    signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    made = DumpSignal()
    os.kill(os.getpid(), signal.SIGUSR2)
    assert seen == [signal.SIGUSR2] and not made.is_installed and not made.has_arrived()


def test_a_later_handler_of_the_user_takes_the_signal():
    made, seen = DumpSignal(), []
    signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    os.kill(os.getpid(), signal.SIGUSR2)
    assert seen == [signal.SIGUSR2] and not made.has_arrived()


def test_the_pipe_of_an_event_loop_stays():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    made = DumpSignal()
    assert not made.is_installed and signal.set_wakeup_fd(-1) == writing
    os.close(reading)
    os.close(writing)


def test_a_signal_behind_an_event_loop_arrives():
    made = DumpSignal()

    async def handle_another() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: None)
        os.kill(os.getpid(), signal.SIGUSR2)

    for _ in range(2):
        asyncio.run(handle_another())
        assert made.has_arrived(), "within the loop"
    os.kill(os.getpid(), signal.SIGUSR2)
    assert made.has_arrived() and not made.has_arrived()


def test_other_threads_install_nothing():
    made = []
    thread = threading.Thread(target=lambda: made.append(DumpSignal()))
    thread.start()
    thread.join()
    assert not made[0].is_installed and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_signals_of_a_forked_child_are_not_the_ranks():
    made = DumpSignal()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    child = os.fork()
    if child == 0:
        ended = 1
        try:
            os.kill(os.getpid(), signal.SIGUSR2)
            # One of the child's own is its own.
            of_child = signal.set_wakeup_fd(writing)
            made.leave_to_parent()
            ended = int(of_child != -1 or signal.set_wakeup_fd(-1) != writing)
        finally:
            os._exit(ended)
    assert os.waitpid(child, 0)[1] == 0 and not made.has_arrived()
    os.kill(os.getpid(), signal.SIGUSR2)
    assert made.has_arrived()
    os.close(reading)
    os.close(writing)


def test_a_blocked_main_thread_does_not_delay_it():
    """The main thread is in a call of C; another thread sees the signal meanwhile."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            """
import ctypes, os, signal, threading, time
from mpidist.comm.watchdog.dump_signal import DumpSignal
made = DumpSignal()
def watch():
    os.kill(os.getpid(), signal.SIGUSR2)
    while not made.has_arrived():
        time.sleep(0.01)
    os.write(1, b"arrived")
    os._exit(0)
threading.Thread(target=watch).start()
semaphore = ctypes.create_string_buffer(64)
libc = ctypes.CDLL(None)
libc.sem_init(semaphore, 0, 0)
while True:
    libc.sem_wait(semaphore)
""",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert done.stdout == "arrived", done.stderr
