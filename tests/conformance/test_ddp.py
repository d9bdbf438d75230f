"""PyTorch's tests of data-parallel modules within distributed autograd, at 4 and at 6 ranks.

The tests of 6 ranks are in ``test_hybrid``.
"""

from __future__ import annotations

import os

import pytest

from mpidist.comm.mpi.launcher_env import from_environment

pytestmark = [pytest.mark.filterwarnings("ignore")]


def names_of(suite_name: str) -> list[str]:
    """Return the tests of a suite."""
    from tests.conformance import ddp_suite, suite

    return suite.names_of(getattr(ddp_suite, suite_name))


def pytest_generate_tests(metafunc):
    # Only in a job of the right size, because the import of torch's suites takes seconds on each
    # rank.
    if "name" in metafunc.fixturenames:
        suite_name, needs = {"comparison": ("ComparisonSuite", 4), "hybrid": ("HybridSuite", 6)}[
            metafunc.function.suite
        ]
        runs = (
            metafunc.config.getoption("--only-mpi", False)
            and (from_environment(os.environ).size or 1) == needs
        )
        metafunc.parametrize("name", names_of(suite_name) if runs else [])


@pytest.mark.mpi(min_size=4)
def test_comparison(name, group):
    from tests.conformance import ddp_suite, suite

    suite.run_on_all(ddp_suite.ComparisonSuite, name, group)


@pytest.mark.mpi(min_size=6)
def test_hybrid(name, group):
    from tests.conformance import ddp_suite, suite

    suite.run_on_all(ddp_suite.HybridSuite, name, group)


test_comparison.suite = "comparison"
test_hybrid.suite = "hybrid"
