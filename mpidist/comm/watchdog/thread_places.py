"""Places of threads: a line of the user's program, and the innermost frame.

A thread reads the stacks of others while these wait or compute, at the time of a report alone. Only
C code that keeps the interpreter stops such a reader.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from mpidist.comm.watchdog import thread_stacks
from mpidist.comm.watchdog.thread_stacks import Line

_OURS = str(Path(__file__).resolve().parents[2]) + os.sep
# Found, not imported: the command reads stacks without torch.
_SPEC = importlib.util.find_spec("torch")
_TORCH = str(Path((_SPEC and _SPEC.origin) or "torch").resolve().parent) + os.sep
_PATHS = sysconfig.get_paths()
_STANDARD = tuple({_PATHS[name] + os.sep for name in ("stdlib", "platstdlib")})
_INSTALLED = tuple({_PATHS[name] + os.sep for name in ("purelib", "platlib")})
_LENGTH = 80  # of a path
_HANDLERS = "mpidist-rpc-"  # names of the threads that run handlers of calls
_MOST = 8  # handlers
# Processor time of a thread that computes, and how long it may take: ranks may share a core, whose
# turns last milliseconds.
_COMPUTES_S, _LOOK_S = 0.01, 0.2


def places() -> list[str]:
    """Return the place of the main thread, and those of handlers of calls.

    A main thread outside mpidist that takes processor time is said to compute: it is slow, where
    another sleeps or waits for something.
    """
    thread = threading.main_thread()
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return of_handlers()
    # A thread in mpidist may look at MPI all the time, and waits all the same.
    is_outside = not frame.f_code.co_filename.startswith(_OURS)
    computing = ", computing" if is_outside and _is_computing(thread) else ""
    return [f"main thread{computing}: {described(thread_stacks.of_frame(frame))}", *of_handlers()]


def _is_computing(thread: threading.Thread) -> bool:
    """Return whether a thread takes a processor."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    if clock_of is None or thread.ident is None or not thread.is_alive():
        return False
    clock = clock_of(thread.ident)
    enough_s, end = time.clock_gettime(clock) + _COMPUTES_S, time.monotonic() + _LOOK_S
    while time.monotonic() < end:
        if time.clock_gettime(clock) >= enough_s:
            return True
        # A loop here would take the interpreter from the other thread.
        time.sleep(_COMPUTES_S)
    return False


def of_handlers() -> list[str]:
    """Return the places of threads that run handlers of calls."""
    frames = sys._current_frames()
    found = [
        f"{thread.name}: {described(lines)}"
        for thread in threading.enumerate()
        if thread.name.startswith(_HANDLERS)
        and (lines := thread_stacks.of_frame(frames.get(thread.ident or 0)))
        and not is_idle(lines)
    ]
    return sorted(found)[:_MOST]


def locks() -> dict[int, str]:
    """Return, by the kernel's number of each thread, the place of the lock it waits for, or "".

    Without those of which it is not known.
    """
    frames = sys._current_frames()
    return {
        thread.native_id: place
        for thread in threading.enumerate()
        if thread.native_id is not None
        and (place := awaited(thread_stacks.of_frame(frames.get(thread.ident or 0)))) is not None
    }


def awaited(lines: Sequence[Line]) -> str | None:
    """Return the place of the lock for which a thread waits; "" if it waits for none.

    None if the text of its innermost line is not there, as of a program without a file.
    """
    line = thread_stacks.awaited_lock(lines)
    if line is not None:
        return _place(line)
    return "" if lines and thread_stacks.has_text(lines[0]) else None


def is_idle(lines: Sequence[Line]) -> bool:
    """Return whether a stack has no line of a program: a thread of ours that waits for work."""
    return all(map(_is_library, lines))


def described(lines: Sequence[Line]) -> str:
    """Return the line of a stack: ``train.py:5 in load_data()``, and the innermost frame if other.

    The place in the user's program is the innermost frame outside all installed packages and
    Python's own modules, else outside mpidist, torch and Python's own modules.

    Args:
        lines: The innermost first; one at least.
    """
    users = next((line for line in lines if not _is_installed(line)), None)
    users = users or next((line for line in lines if not _is_library(line)), None)
    if users is None or users is lines[0]:
        return _place(lines[0])
    return f"{_place(users)}, within {_place(lines[0])}"


def _is_installed(line: Line) -> bool:
    return _is_library(line) or line.file.startswith(_INSTALLED)


def _is_library(line: Line) -> bool:
    file = line.file
    if file.startswith(_INSTALLED):  # within the folder of Python's own modules
        return file.startswith((_OURS, _TORCH))
    return file.startswith(("<frozen", _OURS, _TORCH, *_STANDARD))


def _place(line: Line) -> str:
    name = line.function
    function = "" if name == "<module>" else f" in {name}" + ("" if name[0] == "<" else "()")
    return f"{_short(line.file)}:{line.number}{function}"


def _short(file: str) -> str:
    """Return a file's path without the folder of its package, or of the process."""
    if file.startswith(_OURS):
        return os.path.join("mpidist", file[len(_OURS) :])
    with contextlib.suppress(OSError):  # a working folder that was removed
        folders = (*_INSTALLED, *_STANDARD, os.getcwd() + os.sep)
        file = next((file[len(each) :] for each in folders if file.startswith(each)), file)
    return file if len(file) <= _LENGTH else "..." + file[-_LENGTH:]
