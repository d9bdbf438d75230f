"""Time limits and leak checks of RPC's tests: a hanging test ends its process."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

import mpidist.rpc as rpc
from mpidist.rpc import api
from tests.tools.support import agree

CALL_S = 60  # the limit of one call, and of a shutdown


@contextlib.contextmanager
def process_ends_after(seconds: float, config: Any) -> Iterator[None]:
    """Limit the time of a block: on expiry, print the stacks of all threads and end the process.

    MPI then ends the other ranks.
    """
    # In the place of pytest's own limit, and on its file: while a test runs, stderr itself is
    # captured and would be lost.
    faulthandler.dump_traceback_later(
        seconds, exit=True, file=config.stash[fault_handler_stderr_fd_key]
    )
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def limit_of_tests(seconds: float) -> Any:
    """Return a fixture that limits the time of each test of a module, in seconds."""

    @pytest.fixture(autouse=True)
    def limit(request: Any) -> Iterator[None]:
        with process_ends_after(seconds, request.config):
            yield

    return limit


def left_behind(agent: Any) -> list[str]:
    """Return the entries, calls and threads that a worker has left after its shutdown."""
    entries, forks = agent.references.store.counts()
    threads = [
        thread.name for thread in threading.enumerate() if thread.name.startswith("mpidist-rpc")
    ]
    found = [f"{entries} entries"] * bool(entries) + [f"{forks} forks"] * bool(forks)
    return found + [f"{len(agent.calls)} calls"] * bool(len(agent.calls)) + threads


def shut_down(group: Any, timeout: float = CALL_S) -> None:
    """End RPC on all ranks of a group, and require that nothing is left behind on any."""
    agent = api._get_current_rpc_agent()
    gc.collect()
    rpc.shutdown(timeout=timeout)
    found = left_behind(agent)
    agree(group, not found, f"left behind: {found}")


def joined(threads: list[threading.Thread], seconds: float) -> list[str]:
    """Return the names of threads that have not ended after some seconds."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread.name for thread in threads if thread.is_alive()]


def soon(holds: Callable[[], bool], seconds: float = CALL_S) -> bool:
    """Wait until a condition holds, at most some seconds; return whether it has held."""
    deadline = time.monotonic() + seconds
    # Not asked again once it has held: another rank may have gone on since.
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
