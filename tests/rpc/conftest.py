"""Fixtures: workers for one test, with a check of tables and threads after the shutdown."""

from __future__ import annotations

import pytest

import mpidist.rpc as rpc
from mpidist.rpc import api
from tests.rpc.limits import shut_down


@pytest.fixture
def workers(group):
    """Return the names of all workers: worker0, worker1, …, by rank in the group."""
    rpc.init_rpc(f"worker{group.rank}", group=group)
    yield [f"worker{rank}" for rank in range(group.size)]
    if api._is_current_rpc_agent_set():
        shut_down(group)


@pytest.fixture
def to(group, workers):
    """Return the next worker."""
    return workers[(group.rank + 1) % group.size]
