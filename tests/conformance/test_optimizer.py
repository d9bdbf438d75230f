"""PyTorch's tests of DistributedOptimizer on mpidist.optim, all of them, in one job of 4 ranks."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.filterwarnings("ignore")]


def names_at(function, size: int) -> list[str]:
    """Return the tests of a function in a job of ``size`` ranks."""
    if size < 4:
        return []
    from tests.conformance import optimizer_suite, suite

    return suite.names_of(optimizer_suite.OptimizerSuite)


def test_optimizer(name, group):
    from tests.conformance import optimizer_suite, suite

    suite.run_on_all(optimizer_suite.OptimizerSuite, name, group)
