"""Consistency of the lists of excluded and failing tests with this torch's distributed_test."""

from __future__ import annotations

import pytest

from tests.conformance.c10d_lists import KNOWN_FAILURES, LONG, NOT_APPLICABLE

pytestmark = pytest.mark.slow  # the import of torch's suites takes seconds


def test_listed_tests_exist_and_most_of_what_applies_is_to_pass():
    from tests.conformance import c10d_module
    from tests.conformance.test_c10d import sorted_out

    names = set(c10d_module.names())
    assert len(names) > 250 and set(LONG) <= names
    for mode, listed in NOT_APPLICABLE.items():
        failing = KNOWN_FAILURES[mode]
        assert not set(listed) & set(failing)
        assert not [
            name
            for name in [*listed, *failing]
            if name not in names or c10d_module.needs(name).ddp is (mode == "group")
        ]
    # At most nineteen more need a GPU, as Gloo reports in the run.
    for size in c10d_module.SIZES:
        applicable = len(sorted_out("our_ddp", size, short=False)[0]) + len(
            KNOWN_FAILURES["our_ddp"]
        )
        assert len(KNOWN_FAILURES["our_ddp"]) <= 0.02 * (applicable - 19)


def test_each_test_is_run_at_one_number_of_ranks_or_counted_with_the_reason():
    from tests.conformance import c10d_module
    from tests.conformance.test_c10d import sorted_out

    for mode, listed in NOT_APPLICABLE.items():
        of_mode = [
            name for name in c10d_module.names() if c10d_module.needs(name).ddp is (mode != "group")
        ]
        run = []
        for size in c10d_module.SIZES:
            chosen, others = sorted_out(mode, size, short=True)
            assert len(chosen) + sum(others.values()) == len(of_mode)
            run += chosen
        left = (
            {name for name in of_mode if c10d_module.needs(name).skipped}
            | set(listed)
            | set(KNOWN_FAILURES[mode])
            | set(LONG)
        )
        assert sorted(run) == [name for name in of_mode if name not in left]


def test_one_rank_that_fails_is_the_verdict():
    from tests.conformance.c10d_suite import Outcome, together

    assert together([Outcome("passed"), Outcome("skipped", "why")]) == Outcome(
        "skipped", "rank 1: why"
    )
    assert together([Outcome("skipped", "why"), Outcome("failed", "wrong")]).kind == "failed"
    assert together([Outcome("passed")] * 2) == Outcome("passed")
