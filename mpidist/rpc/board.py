"""What a worker knows of the others while all wait for quiet: see ``quiescence``."""

from __future__ import annotations

import threading


class Board:
    """What one worker knows of the others' reports, and what rank 0 says.

    Attributes:
        reports: By round and rank: (started, answered, one-way sent, one-way taken). Rank 0's alone.
        last: The sums of the round before.
        verdicts: By round.
        news: Set when something came.
    """

    def __init__(self) -> None:
        self.reports: dict[int, dict[int, tuple[int, ...]]] = {}
        self.last: tuple[int, ...] | None = None
        self.verdicts: dict[int, int] = {}
        self.news = threading.Event()
        self.round = 0
