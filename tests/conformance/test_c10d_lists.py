"""The lists of what does not apply, and of what fails, say the truth about distributed_test of this torch."""

from __future__ import annotations

import pytest

from tests.conformance.c10d_lists import KNOWN_FAILURES, LONG, NOT_APPLICABLE

pytestmark = pytest.mark.slow  # importing torch's suites takes seconds


def test_listed_tests_exist_and_most_of_what_applies_is_to_pass():
    from tests.conformance import c10d_module
    from tests.conformance.test_c10d import sorted_out

    names = set(c10d_module.names())
    assert set(LONG) <= names
    for mode, listed in NOT_APPLICABLE.items():
        failing = KNOWN_FAILURES[mode]
        assert not set(listed) & set(failing)
        assert {
            name for name in [*listed, *failing] if name not in names or c10d_module.needs(name).ddp is (mode == "group")
        } == set()
    # Sixteen more need a GPU, as Gloo tells in the run.
    for size in c10d_module.SIZES:
        assert len(KNOWN_FAILURES["our_ddp"]) <= 0.02 * (len(sorted_out("our_ddp", size)[0]) - 16)
