"""Linger: the time between a report and the end of the job, for a look at the processes.

``MPIDIST_LINGER`` has its seconds. The report then ends with a command for each rank that lives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from mpidist.comm.mpi.world import Process

ENV_LINGER = "MPIDIST_LINGER"


def limit_s(environ: Mapping[str, str]) -> float:
    """Return the seconds of ``MPIDIST_LINGER``, 0 if it is not set.

    Raises:
        ValueError: It is no number of seconds from 0 on.
    """
    text = environ.get(ENV_LINGER, "").strip() or "0"
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise ValueError(
            f"{ENV_LINGER} needs a number of seconds, 0 or more; got {environ[ENV_LINGER]!r}"
        )
    return seconds


def commands(seconds: float, processes: Mapping[int, Process]) -> str:
    """Return the lines of a report with a command for each rank; empty without a time.

    Args:
        seconds: Of the wait.
        processes: Those that live, by the rank in the group.
    """
    if not seconds:
        return ""
    lines = [f"  the job ends in {seconds:g} s ({ENV_LINGER}); until then:"]
    lines += [
        f"    py-spy dump --pid {process.pid}   # rank {rank}, on {process.host}"
        for rank, process in sorted(processes.items())
    ]
    return "\n".join(lines) + "\n"
