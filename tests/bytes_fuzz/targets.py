"""Names of the targets, and how many of all cases each reads: those whose cases take long read fewer."""

from __future__ import annotations

SHARES = {"payloads": 6, "tables": 1, "startup": 3, "messages": 3}
TARGETS = tuple(SHARES)
