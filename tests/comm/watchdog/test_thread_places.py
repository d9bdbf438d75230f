"""Places of threads: the user's line, and the innermost frame."""

import sysconfig
import threading
from pathlib import Path

import pytest
import torch

import mpidist
from mpidist.comm.watchdog import thread_places
from mpidist.comm.watchdog.thread_stacks import Line

STANDARD = sysconfig.get_path("stdlib")
INSTALLED = sysconfig.get_path("purelib")
OURS = str(Path(mpidist.__file__).parent)
TORCH = str(Path(torch.__file__).parent)


def described(*files):
    """Return the line of a stack whose frames are in these files, the innermost last."""
    lines = [Line(file, 2, f"level{place}") for place, file in enumerate(files, 1)]
    return thread_places.described(lines[::-1])


@pytest.mark.parametrize(
    ("files", "line"),
    [
        (["/home/me/train.py"], "/home/me/train.py:2 in level1()"),
        (
            ["/home/me/train.py", f"{TORCH}/nn/x.py", f"{OURS}/comm/work.py"],
            "/home/me/train.py:2 in level1(), within mpidist/comm/work.py:2 in level3()",
        ),
        # A data loader's wait ends in Python's own modules.
        (
            ["/home/me/train.py", f"{TORCH}/utils/x.py", f"{STANDARD}/selectors.py"],
            "/home/me/train.py:2 in level1(), within selectors.py:2 in level3()",
        ),
        # A framework's program: there is no file of the user's.
        (
            ["<frozen runpy>", f"{INSTALLED}/trainer/loop.py", f"{OURS}/ddp/module.py"],
            "trainer/loop.py:2 in level2(), within mpidist/ddp/module.py:2 in level3()",
        ),
        ([f"{OURS}/cli/app.py"], "mpidist/cli/app.py:2 in level1()"),
        (["<string>"], "<string>:2 in level1()"),
        (["/x" * 100 + "/train.py"], "..." + ("/x" * 100 + "/train.py")[-80:] + ":2 in level1()"),
    ],
)
def test_the_innermost_frame_of_the_users_is_named(files, line):
    assert described(*files) == line


def test_another_thread_reads_the_main_thread_and_handlers():
    go, begun, found = threading.Event(), threading.Event(), []

    def handler():
        begun.set()
        go.wait()

    threads = [
        threading.Thread(target=handler, name="mpidist-rpc-w1-0"),
        threading.Thread(target=go.wait, name="mpidist-rpc-w1-1"),  # an idle one
        threading.Thread(target=handler, name="other"),
    ]
    for thread in threads:
        thread.start()
    begun.wait()
    reader = threading.Thread(target=lambda: found.extend(thread_places.places()))
    reader.start()
    reader.join()
    go.set()
    for thread in threads:
        thread.join()
    main, handling = found
    assert main.startswith("main thread: tests/comm/watchdog/test_thread_places.py:")
    assert (
        "in test_another_thread_reads_the_main_thread_and_handlers(), within threading.py:" in main
    )
    assert handling.startswith("mpidist-rpc-w1-0: tests/comm/watchdog/test_thread_places.py:")
    assert "in handler(), within threading.py:" in handling


def test_a_main_thread_that_computes_is_told_from_one_that_waits(monkeypatch):
    def main_of(work):
        """Return the places while a thread that stands for the main thread works."""
        started, stop = threading.Event(), threading.Event()

        def run():
            started.set()
            work(stop)

        thread = threading.Thread(target=run)
        thread.start()
        started.wait()
        monkeypatch.setattr(thread_places.threading, "main_thread", lambda: thread)
        try:
            return thread_places.places()[0]
        finally:
            stop.set()
            thread.join()
            monkeypatch.undo()

    def compute(stop):
        while not stop._flag:  # no function, whose frame would be in another file
            sum(range(100))

    assert main_of(compute).startswith("main thread, computing: ")
    assert main_of(threading.Event.wait).startswith("main thread: ")
    # A look at MPI that goes on all the time is a wait.
    monkeypatch.setattr(thread_places, "_OURS", str(Path(__file__).parent))
    assert main_of(compute).startswith("main thread: ")


def test_threads_that_wait_for_a_lock_are_found_by_their_numbers():
    lock, begun = threading.Lock(), threading.Event()

    def wait():
        begun.set()
        with lock:
            pass

    with lock:
        thread = threading.Thread(target=wait)
        thread.start()
        begun.wait()
        while not (place := thread_places.locks()[thread.native_id]):
            pass
    thread.join()
    assert place.startswith("tests/comm/watchdog/test_thread_places.py:")
    assert place.endswith("in wait()") and not thread_places.locks()[threading.get_native_id()]
