"""Fixtures of workers, and of contexts with gradients given by a test."""

from __future__ import annotations

import pytest

import mpidist.rpc as rpc
from mpidist.errors import MpidistError
from mpidist.optim import gradients
from mpidist.rpc import api
from tests.autograd.conftest import engine  # noqa: F401
from tests.optim import owners


@pytest.fixture
def workers(group):
    """Return the names of all workers; this one has its group's rank."""
    rpc.init_rpc(f"worker{group.rank}", group=group)
    yield [f"worker{rank}" for rank in range(group.size)]
    if api._is_current_rpc_agent_set():
        rpc.shutdown()


@pytest.fixture
def given(monkeypatch):
    """Replace this worker's contexts by those of ``owners.give``; workers know each other's."""
    owners.contexts.clear()

    def of_context(context_id):
        require_context(context_id)
        return owners.contexts.get(context_id, {})

    def require_context(context_id):
        if context_id not in owners.CONTEXTS:
            raise MpidistError(f"Could not find autograd context with id: {context_id}")

    monkeypatch.setattr(gradients, "of_context", of_context)
    monkeypatch.setattr(gradients, "require_context", require_context)
