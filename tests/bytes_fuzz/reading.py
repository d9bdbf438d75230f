"""Process that reads untrusted bytes, ``python -m tests.bytes_fuzz.reading``; see ``watching``."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from typing import Any

from tests.bytes_fuzz.board import Board
from tests.bytes_fuzz.guard import Guard
from tests.bytes_fuzz.mutations import MOST_BYTES, mutated

_WARM_UP = 300  # cases before the guard is armed: torch and numpy import lazily
_DRAWN = 50  # one in so many cases is drawn by hypothesis, which is 100 times slower


class Wrong(Exception):
    """A case that was read wrongly."""

    def __init__(self, case: bytes, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.case = case
        self.trace = "".join(traceback.format_exception(error))


class Reader:
    """Reads the cases of one target.

    Args:
        board: Receives each case before it is read.
        folder: Files may be opened there.
    """

    def __init__(self, board: Board, folder: str) -> None:
        self._board = board
        self._guard = Guard(folder)
        self._number = 0

    def begin(self, place: int) -> None:
        """Record that no case is read for now: imports and samples have their own time limit."""
        self._board.write(0, place, b"")

    def run(self, place: int, module: Any, count: int, seed: int) -> dict[str, Any]:
        """Read ``count`` cases; return counts and seconds.

        Raises:
            Wrong: The first case that was read wrongly.
        """
        self._guard.imports = getattr(module, "IMPORTS", ())
        samples = module.samples()
        rng = random.Random(seed)
        for sample in samples:
            self._board.write(self._next(), place, sample)
            try:
                module.check(sample)
            except Exception as error:
                raise Wrong(sample, error) from None
        for _ in range(_WARM_UP):
            self._one(place, module, mutated(rng, samples), is_guarded=False)
        self._guard.limit()
        start = time.monotonic()
        drawn = count // _DRAWN if hasattr(module, "cases") else 0
        for _ in range(count - drawn):
            self._one(place, module, mutated(rng, samples))
        if drawn:
            self._draw(place, module, module.cases(tuple(samples)), drawn, seed)
        return {"count": count, "drawn": drawn, "seconds": round(time.monotonic() - start, 2)}

    def _draw(self, place: int, module: Any, strategy: Any, count: int, seed: int) -> None:
        import hypothesis  # half a second, for targets with strategies

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(strategy)
        def test(case: bytes) -> None:
            self._one(place, module, case[:MOST_BYTES])

        test()

    def one(self, module: Any, case: bytes) -> None:
        """Read a single case."""
        self._guard.imports = getattr(module, "IMPORTS", ())
        for sample in module.samples():
            module.check(sample)
        self._guard.limit()
        self._one(0, module, case)

    def _one(self, place: int, module: Any, case: bytes, is_guarded: bool = True) -> None:
        self._board.write(self._next(), place, case)
        try:
            if is_guarded:
                with self._guard:
                    module.check(case)
                self._guard.require_clean()
            else:
                module.check(case)
        except BaseException as error:
            raise Wrong(case, error) from None

    def _next(self) -> int:
        self._number += 1
        return self._number


def main() -> int:
    """Run the command line; the last line of the output is the result in JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("board")
    parser.add_argument("--targets", required=True)
    parser.add_argument("--counts", default="0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--case", default=None)
    options = parser.parse_args()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    names = options.targets.split(",")
    counts = [int(count) for count in options.counts.split(",")]
    with tempfile.TemporaryDirectory(prefix="bytes-fuzz-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        reader = Reader(Board(options.board), folder)
        for place, name in enumerate(names):
            if place < options.first:
                continue
            reader.begin(place)
            module = importlib.import_module(f"tests.bytes_fuzz.{name}")
            try:
                if options.case is not None:
                    reader.one(module, bytes.fromhex(options.case))
                    outcome: dict[str, Any] = {"count": 1}
                else:
                    outcome = reader.run(place, module, counts[place], options.seed)
            except Wrong as wrong:
                outcome = {"case": wrong.case.hex(), "error": str(wrong), "trace": wrong.trace}
            print(json.dumps({"target": name, "place": place, **outcome}), flush=True)
            if "error" in outcome:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
