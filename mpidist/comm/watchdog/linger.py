"""Linger: the time between a report and the end of the job, for a look at the processes.

``MPIDIST_LINGER`` has its seconds. The report then ends with a command for each rank that lives.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpidist.comm.mpi.world import Process
from mpidist.comm.watchdog import seconds_setting

ENV_LINGER = "MPIDIST_LINGER"


def limit_s(environ: Mapping[str, str]) -> float:
    """Return the seconds of ``MPIDIST_LINGER``, 0 if it is not set.

    Raises:
        ValueError: It is no number of seconds from 0 on.
    """
    return seconds_setting.seconds(environ, ENV_LINGER, 0.0, "0 or more")


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
