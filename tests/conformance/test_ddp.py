"""PyTorch's tests of data-parallel modules within distributed autograd: at 4 ranks, and at 6 (``test_hybrid``)."""

from __future__ import annotations

import os

import pytest

from mpidist.comm.launch import from_environment

pytestmark = [pytest.mark.filterwarnings("ignore")]


def pytest_generate_tests(metafunc):
    # Only within a job of the right size: importing torch's suites takes seconds on each rank.
    if "name" in metafunc.fixturenames:
        from tests.conformance import ddp_suite, suite

        of, ranks = {"comparison": (ddp_suite.ComparisonSuite, 4), "hybrid": (ddp_suite.HybridSuite, 6)}[metafunc.function.suite]
        runs = metafunc.config.getoption("--only-mpi", False) and (from_environment(os.environ).size or 1) == ranks
        metafunc.parametrize("name", suite.names_of(of) if runs else [])


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
