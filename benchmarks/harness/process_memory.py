"""Memory of this process as Linux reports it in /proc; needs no other package."""

from __future__ import annotations

import math
from pathlib import Path


def resident_mib() -> float:
    """Return the resident memory in MiB."""
    return _status_mib("VmRSS")


def peak_mib() -> float:
    """Return the largest resident memory since the start, or since ``reset_peak``, in MiB."""
    return _status_mib("VmHWM")


def resident_and_shared_mib() -> tuple[float, float]:
    """Return the resident memory and its proportional share (PSS) in MiB."""
    kib = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, _, value = line.partition(":")
        kib[name] = int(value.split()[0])
    return kib["Rss"] / 1024, kib["Pss"] / 1024


def reset_peak() -> bool:
    """Reset the peak to the current resident memory; return whether the system allows this."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status_mib(field: str) -> float:
    """Return a field of /proc/self/status; NaN without such a file."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return math.nan
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))
