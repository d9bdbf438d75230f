"""Stacks of threads as data (pure): read from faulthandler's text, or from a living thread.

faulthandler writes addresses of threads; the table that the watchdog adds (``table_row``) has the
kernel's number and the name of each, by which entries of a recording are found.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple

_HEAD = re.compile(
    r"(Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\)"
)
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_ROW = re.compile(r"# thread 0x([0-9a-f]+) (\d+) (.*)")
_END = "# end of the table of threads"
# Modules of Python whose innermost frame is a wait for another thread.
_WAITING_FILES = ("threading.py", "queue.py", "_base.py")
# A call of C that waits for another thread, and a lock's ``with``, which has no frame of its own.
_WAITING_LINE = re.compile(r"\.(acquire|wait|join)\(|^(async\s+)?with\b")


class Line(NamedTuple):
    """One frame of a stack: file, number of the line, and the function's name."""

    file: str
    number: int
    function: str


@dataclass(frozen=True)
class Stack:
    """Stack of one thread.

    Attributes:
        lines: Its frames, the innermost first.
        thread: The kernel's number of the thread; 0 if it is not known.
        name: Python's name of the thread; "" if it is not known.
    """

    lines: tuple[Line, ...]
    thread: int = 0
    name: str = ""


def of_frame(frame: FrameType | None) -> tuple[Line, ...]:
    """Return the lines of a living stack."""
    lines = []
    while frame is not None:
        lines.append(Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(lines)


def table(threads: Iterable[tuple[int, int, str]]) -> str:
    """Return the text of threads: Python's identity, the kernel's number, and the name of each."""
    rows = [f"# thread 0x{ident:016x} {native} {name}" for ident, native, name in threads]
    return "\n".join([*rows, _END]) + "\n"


def has_table(text: str) -> bool:
    """Return whether the text has a whole table of threads."""
    return text.rstrip().endswith(_END)


def parsed(text: str) -> list[Stack]:
    """Return the stacks in faulthandler's text, with what the table in it says of each thread.

    Lines of another form are passed over; of a thread with several stacks the last counts.
    """
    found: dict[int, list[Line]] = {}
    known: dict[int, tuple[int, str]] = {}
    lines: list[Line] = []
    for row in text.splitlines():
        if (frame := _FRAME.fullmatch(row)) is not None:
            lines.append(Line(frame[1], int(frame[2]), frame[3]))
        elif (head := _HEAD.match(row)) is not None:
            ident = int(head[2], 16)
            # Its place is that of the last stack.
            found.pop(ident, None)
            found[ident] = lines = []
            known.setdefault(ident, (0, head[3] or ""))
        elif (entry := _ROW.fullmatch(row)) is not None:
            known[int(entry[1], 16)] = int(entry[2]), entry[3]
    return [Stack(tuple(each), *known[ident]) for ident, each in found.items()]


def has_text(line: Line) -> bool:
    """Return whether the text of a line can be read here."""
    return bool(linecache.getline(line.file, line.number))


def awaited_lock(lines: Sequence[Line]) -> Line | None:
    """Return the line at which a thread waits for a lock, an event or another thread; None if not.

    A line of the program that takes a lock may as well have it already: between two instructions.
    """
    if not lines:
        return None
    if lines[0].file.endswith(_WAITING_FILES):
        return next((line for line in lines if not line.file.endswith(_WAITING_FILES)), lines[0])
    text = linecache.getline(lines[0].file, lines[0].number).strip()
    return lines[0] if _WAITING_LINE.search(text) else None
