"""Targets and their shares of all cases; slow targets have small shares."""

from __future__ import annotations

SHARES = {
    "payloads": 12,
    "tables": 4,
    "sections": 4,
    "frames": 6,
    "startup": 6,
    "messages": 6,
    "checkpoints": 1,
}
TARGETS = tuple(SHARES)
