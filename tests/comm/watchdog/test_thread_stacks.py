"""Stacks of threads: faulthandler's text, the table of threads, and waits for locks."""

import faulthandler
import sys
import threading
import time

import pytest

from mpidist.comm.watchdog import thread_stacks
from mpidist.comm.watchdog.thread_stacks import Line, Stack

TEXT = """\
Thread 0x00007f1 (most recent call first):
  File "/a b/train.py", line 12 in f
  File "<string>", line 1 in <module>

Current thread 0x00007f2 [a name] (most recent call first):
  <no Python frame>
"""


def test_the_text_and_the_table_are_joined():
    table = thread_stacks.table([(0x7F1, 77, "MainThread")])
    assert not thread_stacks.has_table(TEXT) and thread_stacks.has_table(TEXT + table)
    lines = (Line("/a b/train.py", 12, "f"), Line("<string>", 1, "<module>"))
    # From Python 3.14 on faulthandler writes names by itself.
    assert thread_stacks.parsed(TEXT) == [Stack(lines), Stack((), 0, "a name")]
    assert thread_stacks.parsed(TEXT + table)[0] == Stack(lines, 77, "MainThread")


def test_the_last_stack_of_a_thread_counts():
    again = 'noise\nThread 0x00007f1 (most recent call first):\n  File "b.py", line 3 in g\n'
    assert thread_stacks.parsed(TEXT + again) == [
        Stack((), 0, "a name"),
        Stack((Line("b.py", 3, "g"),)),
    ]
    assert thread_stacks.parsed("") == [] and thread_stacks.parsed("\x00  File") == []


@pytest.mark.slow
def test_living_threads_wait_for_locks_or_compute(tmp_path):
    """faulthandler's own text of four threads."""
    lock, event, plain = threading.Lock(), threading.Event(), threading.Lock()

    def by_with():
        with lock:
            pass

    def by_acquire():
        lock.acquire()
        lock.release()

    def by_event():
        event.wait()

    def in_sleep():
        plain.locked()
        while not event.is_set():
            time.sleep(0.05)

    functions = (by_with, by_acquire, by_event, in_sleep)
    with lock:
        threads = [threading.Thread(target=each, name=each.__name__) for each in functions]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        with (tmp_path / "stacks").open("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.write(
                thread_stacks.table([(each.ident, each.native_id, each.name) for each in threads])
            )
            file.seek(0)
            text = file.read()
        living = {
            each.name: thread_stacks.of_frame(sys._current_frames()[each.ident]) for each in threads
        }
    event.set()
    for thread in threads:
        thread.join()
    stacks = {each.name: each for each in thread_stacks.parsed(text)}
    assert stacks["by_with"].thread == threads[0].native_id
    for name in ("by_with", "by_acquire", "by_event"):
        for lines in (stacks[name].lines, living[name]):
            line = thread_stacks.awaited_lock(lines)
            assert line is not None and line.function == name, name
    assert thread_stacks.awaited_lock(stacks["in_sleep"].lines) is None
    assert thread_stacks.awaited_lock(()) is None
