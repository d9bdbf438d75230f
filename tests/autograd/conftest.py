"""Workers for one test, as in ``tests/rpc``; at its end no context may be left on any of them."""

from __future__ import annotations

import time

import pytest

import mpidist.autograd as autograd
from mpidist.autograd.api import _engine
from mpidist.rpc import interceptor
from tests.rpc.conftest import to, workers  # noqa: F401
from tests.support import agree


@pytest.fixture(autouse=True)
def engine(request):
    """Have the engine registered, whatever another test has registered before."""
    interceptor.register(_engine)
    yield _engine
    if "group" in request.fixturenames:
        interceptor.register(None)


@pytest.fixture
def clean(group, workers):  # noqa: F811
    """Require that all contexts are gone when a test is over."""
    yield
    group.barrier()
    deadline = time.monotonic() + 20
    while len(_engine.contexts) and time.monotonic() < deadline:
        time.sleep(0.001)
    info = autograd._get_debug_info()
    agree(
        group, set(info.values()) == {"0"} and not _engine.initiator._passes, f"left over: {info}"
    )
