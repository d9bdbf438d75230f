"""Pytest plugin that delays one rank between its fixtures and its test.

Loaded by ``-p tests.tools.late_rank``. The other ranks begin the test, and their messages reach a
rank that has not: what it reads must not depend on having begun, too. The rank is drawn by a
checksum of the test's name and ``MPIDIST_TESTS_LATE``, a number that a repeated run changes.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Generator

import pytest

from mpidist.comm.mpi.launcher_env import from_environment

LATE_S = 0.2


def late_rank(name: str, size: int, turn: int) -> int:
    """Return the rank that begins a test late."""
    return (zlib.crc32(name.encode()) + turn) % size


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    yield
    job = from_environment(os.environ)
    turn = int(os.environ.get("MPIDIST_TESTS_LATE", "0"))
    if job.size and "mpi" in item.keywords and job.rank == late_rank(item.nodeid, job.size, turn):
        # Within the phase of the fixtures: pytest begins the phase of the test by itself.
        time.sleep(LATE_S)
