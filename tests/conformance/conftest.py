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


def pytest_generate_tests(metafunc):
    # ``names_at`` of a file returns the tests of its suite for a function and a number of ranks. It
    # is called in jobs only, because the import of torch's suites takes seconds on each rank.
    if "name" in metafunc.fixturenames:
        size = from_environment(os.environ).size or 1
        is_job = metafunc.config.getoption("--only-mpi", False)
        names = metafunc.module.names_at(metafunc.function, size) if is_job else []
        metafunc.parametrize("name", names)


def pytest_terminal_summary(terminalreporter):
    launched = from_environment(os.environ)
    if not _COUNTS or launched.rank:
        return
    terminalreporter.section("PyTorch's distributed_test", sep="-")
    for mode, counts in _COUNTS.items():
        words = ", ".join(f"{number} {kind}" for kind, number in counts.items())
        terminalreporter.line(f"{mode} at {launched.size} ranks: {words}")
