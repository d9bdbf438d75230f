"""PyTorch's tests of DistributedOptimizer on mpidist.optim, all of them, in one job of 4 ranks."""

from __future__ import annotations

import os

import pytest

from mpidist.comm.mpi.launcher_env import from_environment

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.filterwarnings("ignore")]


def pytest_generate_tests(metafunc):
    # Only in a job with enough ranks, because the import of torch's suites takes seconds on each
    # rank.
    names = []
    if (
        metafunc.config.getoption("--only-mpi", False)
        and (from_environment(os.environ).size or 1) >= 4
    ):
        from tests.conformance import optimizer_suite, suite

        names = suite.names_of(optimizer_suite.OptimizerSuite)
    metafunc.parametrize("name", names)


def test_optimizer(name, group):
    from tests.conformance import optimizer_suite, suite

    suite.run_on_all(optimizer_suite.OptimizerSuite, name, group)
