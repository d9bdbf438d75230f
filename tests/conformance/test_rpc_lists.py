"""Consistency of the lists of excluded and failing tests with the suites of this torch."""

from __future__ import annotations

import pytest

from tests.conformance.test_rpc import KNOWN_FAILURES, NOT_APPLICABLE, applicable

pytestmark = pytest.mark.slow  # the import of torch's suites takes seconds


def test_listed_tests_exist():
    from tests.conformance import rpc_suite, suite

    names = suite.names_of(rpc_suite.RpcSuite) + suite.names_of(rpc_suite.FaultySuite)
    assert (
        sorted(set(NOT_APPLICABLE) - set(names)) == [] == sorted(set(KNOWN_FAILURES) - set(names))
    )
    assert not set(NOT_APPLICABLE) & set(KNOWN_FAILURES)


def test_at_least_98_percent_of_what_applies_is_to_pass():
    names = applicable("RpcSuite") + applicable("FaultySuite")
    assert len(names) > 170 and len(KNOWN_FAILURES) <= 0.02 * len(names)
