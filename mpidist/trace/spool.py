"""Spool of one rank's entries while a trace is recorded: a thread that empties the ring in time."""

from __future__ import annotations

import tempfile
import threading
from typing import IO

from mpidist.comm.mpi import runtime
from mpidist.comm.recorder.file_format import SLOT_BYTES
from mpidist.comm.recorder.ring import Ring
from mpidist.comm.recorder.tail import Tail

_MEMORY_BYTES = 1 << 26  # of the spool; more goes to a file in the folder for temporary files
# Between two looks at the ring: longer while little comes, shorter while much does.
_LONGEST_S, _SHORTEST_S = 0.02, 1e-3
_FULL, _EMPTY = 1 / 8, 1 / 32  # of the ring since the last look


class Spool:
    """Entries of this process from now on.

    The thread is not the watchdog's, which may wait a second for the answers of other ranks, and
    which a job of one rank has not.

    Args:
        ring: This process's ring.

    Attributes:
        threads: Names of the threads that were seen, by native id.
        problem: Why later entries are missing: the spool's disk is full.
    """

    def __init__(self, ring: Ring) -> None:
        self._tail = Tail(ring)
        self._slots = ring.slots
        self._memory = bytearray()
        self._file: IO[bytes] | None = None
        self.threads: dict[int, str] = {}
        self.problem = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=runtime.guard_thread(self._run), name="mpidist-trace", daemon=True
        )
        self._thread.start()

    @property
    def lost(self) -> int:
        """Return the number of entries that were overwritten before they were read or stored."""
        return self._tail.lost + self._tail.missing

    def end(self) -> bytes:
        """Stop the thread; return the slots of all entries, those under way the last."""
        self._stop.set()
        self._thread.join()
        self._read()
        return b"".join((self._memory, self._on_disk(), self._tail.under_way()))

    def _run(self) -> None:
        wait_s = _LONGEST_S
        while not self._stop.wait(wait_s):
            wait_s = next_wait_s(wait_s, self._read() / self._slots)

    def _read(self) -> int:
        """Read the ring; return the number of entries that have begun since the last time."""
        before = self._tail.last
        self._store(self._tail.read())
        for thread in threading.enumerate():
            if thread.native_id is not None:
                self.threads[thread.native_id] = thread.name
        return self._tail.last - before

    def _store(self, slots: bytes) -> None:
        if len(self._memory) < _MEMORY_BYTES:
            self._memory += slots
            return
        # A write that has failed may have stored a part of a slot: none follows it.
        if self.problem:
            return
        try:
            if self._file is None:
                # Without a buffer, which would be written again, and fail, when it is closed.
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
            rest = memoryview(slots)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._note(error)

    def _on_disk(self) -> bytes:
        """Return the slots that were written to the file, and close it."""
        if self._file is None:
            return b""
        try:
            with self._file as file:
                file.seek(0)
                found = file.read()
        except OSError as error:
            self._note(error)
            return b""
        return found[: len(found) // SLOT_BYTES * SLOT_BYTES]

    def _note(self, error: OSError) -> None:
        self.problem = (
            f"the folder for temporary files, {tempfile.gettempdir()}, took no more: "
            f"{error.strerror or error}"
        )


def next_wait_s(wait_s: float, share: float) -> float:
    """Return the next time between two looks.

    Args:
        wait_s: The last one.
        share: Of the ring that was filled in it.
    """
    if share > _FULL:
        return max(wait_s / 2, _SHORTEST_S)
    return min(wait_s * 2, _LONGEST_S) if share < _EMPTY else wait_s
