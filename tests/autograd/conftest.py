"""RPC workers for one test, as in ``tests/rpc``, and a check that no context is left at its end."""

from __future__ import annotations

import pytest

import mpidist.autograd as autograd
from mpidist.autograd.api import _engine
from mpidist.rpc.threads import interceptor
from tests.rpc.conftest import to, workers  # noqa: F401
from tests.rpc.limits import soon
from tests.tools.support import agree


@pytest.fixture(autouse=True)
def engine(request):
    """Register the engine, because another test may have registered another one."""
    interceptor.register(_engine)
    yield _engine
    if "group" in request.fixturenames:
        interceptor.register(None)


@pytest.fixture
def clean(group, workers):  # noqa: F811
    """Require at the end of a test that all contexts have been released."""
    yield
    group.barrier()
    released = soon(
        lambda: (
            not len(_engine.contexts)
            and set(autograd._get_debug_info().values()) == {"0"}
            and not _engine.initiator._passes
        )
    )
    agree(group, released, f"left over: {autograd._get_debug_info()}")
