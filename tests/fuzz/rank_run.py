"""State of one program's run on one rank: groups, pending operations, failures."""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from tests.fuzz.issue import Handle
from tests.fuzz.programs import (
    Program,
)


@dataclass
class Pending:
    """Operation in progress.

    ``finish`` waits for the operation and checks the result; ``blocks_close``: ``finish`` must run
    before its group closes.
    """

    due: int
    group: int
    finish: Callable[[], None]
    blocks_close: bool = False


class RankRun:
    """Groups, pending operations and failures of one rank.

    Attributes:
        handles: Open groups of this rank by number.
        pending: Operations in progress.
        failures: Failures on this rank.
        outcomes: "right" or "refused" by position, for calls that may raise.
    """

    def __init__(self, program: Program, world_rank: int, is_quiet: bool) -> None:
        self.program = program
        self.world_rank = world_rank
        self.is_quiet = is_quiet
        self.handles: dict[int, Handle] = {}
        self.pending: list[Pending] = []
        self.rng = random.Random(f"order {program.seed} {world_rank}")
        self.failures: list[str] = []
        self.outcomes: dict[str, str] = {}

    def fail(self, where: str, what: str | BaseException) -> None:
        text = what if isinstance(what, str) else f"{type(what).__name__}: {what}"
        self.failures.append(f"{where}: {text}")
        if self.is_quiet:
            return
        # Print at once, because other ranks may wait for this one without end.
        sys.stderr.write(
            f"seed {self.program.seed}, world rank {self.world_rank}: {where}: {text}\n"
        )
        if isinstance(what, BaseException):
            sys.stderr.write("".join(traceback.format_exception(what)))
        sys.stderr.flush()
