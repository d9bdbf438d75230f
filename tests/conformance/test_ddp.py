"""PyTorch's tests of data-parallel modules within distributed autograd, at 4 and at 6 ranks.

The tests of 6 ranks are in ``test_hybrid``.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.filterwarnings("ignore")]


def names_at(function, size: int) -> list[str]:
    """Return the tests of a function in a job of ``size`` ranks."""
    if size != function.size:
        return []
    from tests.conformance import ddp_suite, suite

    return suite.names_of(getattr(ddp_suite, function.suite))


@pytest.mark.mpi(min_size=4)
def test_comparison(name, group):
    from tests.conformance import ddp_suite, suite

    suite.run_on_all(ddp_suite.ComparisonSuite, name, group)


@pytest.mark.mpi(min_size=6)
def test_hybrid(name, group):
    from tests.conformance import ddp_suite, suite

    suite.run_on_all(ddp_suite.HybridSuite, name, group)


test_comparison.suite, test_comparison.size = "ComparisonSuite", 4
test_hybrid.suite, test_hybrid.size = "HybridSuite", 6
