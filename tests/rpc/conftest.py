"""Workers named worker0, worker1, … for one test, ended gracefully; nothing may be left in any table, and no thread."""

from __future__ import annotations

import gc
import threading

import pytest

import mpidist.rpc as rpc
from mpidist.rpc import api
from tests.support import agree


@pytest.fixture
def workers(group):
    """Return the names of all workers; this one has its group's rank."""
    rpc.init_rpc(f"worker{group.rank}", group=group)
    yield [f"worker{rank}" for rank in range(group.size)]
    if not api._is_current_rpc_agent_set():
        return
    agent = api._get_current_rpc_agent()
    gc.collect()
    rpc.shutdown()
    entries, _ = agent.references.store.counts()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("mpidist-rpc")]
    agree(group, not (entries or left or len(agent.calls)), f"{entries} entries, {len(agent.calls)} calls, threads {left}")


@pytest.fixture
def to(group, workers):
    """Return the next worker."""
    return workers[(group.rank + 1) % group.size]
