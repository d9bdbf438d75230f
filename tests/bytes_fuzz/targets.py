"""Names of the targets, and how many of all cases each reads: those whose cases take long read fewer."""

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
