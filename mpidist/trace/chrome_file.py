"""Trace file in Chrome's JSON, one event a line, which Perfetto and chrome://tracing show.

The facts of a file (``otherData``) stand before its events, so that neither the writer nor the
reader holds the events. A file that another program has written or changed is read as a whole.

Source: "Trace Event Format", Google, 2016; the importer of Perfetto.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from mpidist import whole_file

Event = dict[str, Any]
Facts = dict[str, Any]

_LEVEL = 3  # of gzip: half of the time of its default, a tenth more bytes
_BUFFER_BYTES = 1 << 20
_HEAD, _MIDDLE, _TAIL = '{"displayTimeUnit":"ns","otherData":', ',\n"traceEvents":[\n', "\n]}\n"


class TraceFile:
    """A file that is being written.

    Args:
        file: The bytes go there.
        is_packed: By gzip.
    """

    def __init__(self, file: IO[bytes], is_packed: bool) -> None:
        self._packed = gzip.GzipFile("", "wb", _LEVEL, file, mtime=0) if is_packed else None
        target: Any = file if self._packed is None else self._packed
        self._text = io.TextIOWrapper(io.BufferedWriter(target, _BUFFER_BYTES), "utf-8")
        self._separator = ""

    def begin(self, facts: Facts) -> None:
        """Write the facts, before all events."""
        self._text.write(f"{_HEAD}{json.dumps(facts)}{_MIDDLE}")

    def write(self, events: Iterable[str]) -> None:
        """Write events, each of them JSON without line breaks."""
        for event in events:
            self._text.write(self._separator + event)
            self._separator = ",\n"

    def end(self) -> None:
        """Write the end of the file, which stays open."""
        self._text.write(_TAIL)
        self._text.flush()
        self._text.detach().detach()
        if self._packed is not None:
            self._packed.close()


@contextlib.contextmanager
def written(path: Path) -> Iterator[TraceFile]:
    """Return a trace file that takes the name ``path`` at the end of the context.

    Raises:
        OSError: It cannot be written.
    """
    with whole_file.replacing(path) as file:
        trace = TraceFile(file, path.suffix == ".gz")
        try:
            yield trace
        except BaseException:
            # Here, while the file is open: the wrappers would write to it when they are freed.
            with contextlib.suppress(OSError):
                trace.end()
            raise
        trace.end()


def text_of(event: Event) -> str:
    """Return an event as its line."""
    return json.dumps(event, separators=(",", ":"))


class Reading:
    """A trace file that is read: its facts, and then its events.

    Args:
        path: Of the file, packed by gzip or not.

    Attributes:
        facts: ``otherData``; for a file of torch's profiler all but its events.

    Raises:
        ValueError: It is no trace.
        OSError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._events: list[Event] | None = None
        try:
            with self._opened() as file:
                head, middle = file.readline(), file.readline()
                if head.startswith(_HEAD) and head.endswith(",\n") and middle == _MIDDLE[2:]:
                    self.facts: Facts = json.loads(head[len(_HEAD) : -2])
                    return
                whole = json.loads(head + middle + file.read())
        except (ValueError, EOFError, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is no trace: {error}") from None
        events = whole.pop("traceEvents", None) if isinstance(whole, dict) else None
        if not isinstance(events, list):
            raise ValueError(f"{path} is no trace: it has no traceEvents")
        self._events = [event for event in events if isinstance(event, dict)]
        self.facts = whole.get("otherData", whole)

    def events(self) -> Iterator[Event]:
        """Yield the events.

        Raises:
            ValueError: The file is cut.
        """
        if self._events is not None:
            yield from self._events
            return
        for line in self.lines():
            try:
                event = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{self.path} is cut: {error}") from None
            yield event

    def lines(self) -> Iterator[str]:
        """Yield the text of each event.

        Raises:
            ValueError: The file is cut.
        """
        if self._events is not None:
            yield from map(text_of, self._events)
            return
        try:
            with self._opened() as file:
                file.readline()
                file.readline()
                for line in file:
                    if line == "]}\n":
                        return
                    if line != "\n":
                        yield line.rstrip(",\n")
        except (EOFError, OSError) as error:
            raise ValueError(f"{self.path} is cut: {error}") from None
        raise ValueError(f"{self.path} is cut: it has no end")

    def _opened(self) -> IO[str]:
        with self.path.open("rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
        opened: IO[str] = (gzip.open if is_packed else open)(self.path, "rt", encoding="utf-8")
        return opened
