"""Time limit of each program or model; on expiry a rank prints its position and ends the job."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time


class Deadline:
    """Thread that ends the process if ``stop`` does not follow ``start`` within ``limit_s``."""

    def __init__(self, limit_s: float, rank: int) -> None:
        self._limit_s = limit_s
        self._rank = rank
        self._what = self._where = ""
        self._until: float | None = None
        threading.Thread(target=self._watch, name="fuzz-deadline", daemon=True).start()

    def start(self, what: str) -> None:
        """Start the limit; ``what`` is the command that repeats the run."""
        self._what, self._where = what, "the beginning"
        self._until = time.monotonic() + self._limit_s

    def now(self, where: str) -> None:
        """Record the current position for the message."""
        self._where = where

    def stop(self) -> None:
        """Stop the limit."""
        self._until = None

    def _watch(self) -> None:
        while True:
            time.sleep(0.2)
            until = self._until
            if until is None or time.monotonic() < until:
                continue
            sys.stderr.write(
                f"world rank {self._rank}: {self._what} did not end within {self._limit_s:g} s; it "
                f"is in {self._where}\n"
            )
            faulthandler.dump_traceback(all_threads=True)
            sys.stderr.flush()
            # The other ranks print their messages at about the same time.
            time.sleep(1)
            os._exit(1)
