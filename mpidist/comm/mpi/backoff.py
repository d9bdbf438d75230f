"""Polling with back-off: tests a condition without pauses, then with yields, then with sleeps.

MPI completes messages only while a thread calls MPI, so a wait that MPI does not offer is a loop of
tests. A short wait ends soonest without a pause; a long one must leave the core to computation.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

SPIN_S = 50e-6
YIELD_S = 500e-6
SLEEP_S = 50e-6
# Of a wait that has lasted long, a sleep is at most this share.
_SHARE = 1 / 16


def until(
    ready: Callable[[], object],
    check: Callable[[], object] | None = None,
    timeout_s: float | None = None,
    spin_s: float = SPIN_S,
    yield_s: float = YIELD_S,
    sleep_s: float = SLEEP_S,
    longest_s: float = 0.0,
) -> bool:
    """Call ``ready`` until its result is true.

    Args:
        ready: Tests the condition, and makes progress towards it.
        check: Called before each pause; raises to end the wait.
        timeout_s: Longest wait; None for no limit. ``ready`` is called at least once.
        spin_s: Time from the start without pauses.
        yield_s: Time from the start after which the pauses are sleeps; before, they are yields.
        sleep_s: Duration of one sleep.
        longest_s: Duration up to which sleeps grow, as a sixteenth of the wait so far; below
            ``sleep_s`` they do not.

    Returns:
        False if the time was over first.
    """
    if ready():
        return True
    start = time.monotonic()
    while not ready():
        waited = time.monotonic() - start
        if timeout_s is not None and waited >= timeout_s:
            return False
        if waited > spin_s:
            if check is not None:
                check()
            if waited > yield_s:
                time.sleep(max(sleep_s, min(longest_s, waited * _SHARE)))
            else:
                os.sched_yield()
    return True
