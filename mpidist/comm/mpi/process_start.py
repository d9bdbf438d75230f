"""Start of a process of this node, which tells it from a later process of its number: proc(5)."""

from __future__ import annotations

from pathlib import Path


def start_ticks(pid: int) -> int:
    """Return when a process of this node has begun, in clock ticks since the boot; 0 if none runs.

    A process that has ended and waits for its parent does not run.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    # The name of the program, in parentheses, may hold blanks.
    fields = text.rpartition(")")[2].split()
    return 0 if fields[0] in ("Z", "X") else int(fields[19])
