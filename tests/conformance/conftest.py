"""Counts of PyTorch's distributed_test, printed by the first rank at the end of a job."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from mpidist.comm.mpi.launcher_env import from_environment

_COUNTS: dict[str, Counter[str]] = {}


@pytest.fixture(scope="session")
def c10d_counts() -> dict[str, Counter[str]]:
    """Return the counters by mode."""
    return _COUNTS


def pytest_terminal_summary(terminalreporter):
    launched = from_environment(os.environ)
    if not _COUNTS or launched.rank:
        return
    terminalreporter.section("PyTorch's distributed_test", sep="-")
    for mode, counts in _COUNTS.items():
        words = ", ".join(f"{number} {kind}" for kind, number in counts.items())
        terminalreporter.line(f"{mode} at {launched.size} ranks: {words}")
