"""Clock of the watchdog in tests, and a group with a journal."""

from types import SimpleNamespace

import pytest

from mpidist.comm.execution import op_status as journals
from mpidist.comm.execution.op_status import Journal
from mpidist.comm.mpi.world import Process
from mpidist.comm.watchdog import watchdog, watchdog_peers


@pytest.fixture
def clock(monkeypatch):
    """Return a list of one number, the time of journals and watchdog in seconds."""
    now = [1000.0]
    time = SimpleNamespace(
        monotonic=lambda: now[0],
        time_ns=lambda: int(now[0] * 1e9),
        sleep=lambda seconds: now.__setitem__(0, now[0] + seconds),
    )
    for module in (journals, watchdog, watchdog_peers):
        monkeypatch.setattr(module, "time", time)
    return now


PROCESSES = tuple(Process(100 + rank, f"node{rank}") for rank in range(5))


class Group:
    """The part of a group that the watchdog uses."""

    def __init__(self, world_ranks, timeout_s=5.0, name="test"):
        self.name, self.key, self.world_ranks, self.timeout_s = (
            name,
            f"key of {name}",
            world_ranks,
            timeout_s,
        )
        self.journal = Journal(name, self.key)
        self.is_closed, self.on_timeout = False, "abort"
        self.failure, self.revoked = None, 0

    def fail(self, error):
        self.failure = error

    def revoke(self):
        self.revoked += 1
