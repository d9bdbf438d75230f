"""PyTorch's distributed_test at 2, 3 and 4 ranks, on mpidist's group and DDP.

The modes are mpidist's group, torch's DDP on that group, and mpidist's DDP. Each test runs at one
of the three numbers of ranks, by a checksum of its name; with MPIDIST_CONFORMANCE=all at all three.
A failed test is repeated on Gloo, and excluded if Gloo fails, too.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.conformance.c10d_lists import KNOWN_FAILURES, LONG, NOT_APPLICABLE

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.every_case,
    pytest.mark.filterwarnings("ignore"),
]
_SHORT = os.environ.get("MPIDIST_CONFORMANCE") != "all"


def sorted_out(mode: str, size: int, short: bool = _SHORT) -> tuple[list[str], Counter[str]]:
    """Return a mode's tests at ``size`` ranks, and the number of excluded tests by reason."""
    from tests.conformance import c10d_module

    chosen, others = [], Counter()
    for name in c10d_module.names():
        needs = c10d_module.needs(name)
        if needs.ddp != (mode != "group"):
            continue
        if needs.skipped:
            others["skipped by torch on any backend"] += 1
        elif size not in needs.sizes:
            others["for other numbers of ranks"] += 1
        elif name in NOT_APPLICABLE[mode]:
            others["listed as not applicable"] += 1
        elif name in KNOWN_FAILURES[mode]:
            others["listed as failing"] += 1
        elif short and (name in LONG or c10d_module.size_of(name) != size):
            others["not in the short form"] += 1
        else:
            chosen.append(name)
    return chosen, others


def names_at(function, size: int) -> list[str]:
    """Return the tests of a function in a job of ``size`` ranks."""
    return sorted_out(function.mode, size)[0] if size in (2, 3, 4) else []


@pytest.fixture(scope="module")
def runner(world):
    """Return the runner of the tests, with its own group."""
    from tests.conformance import c10d_suite

    group = world.clone("verdicts")
    yield c10d_suite.Runner(group)
    group.close()


@pytest.fixture
def passes(runner, world, request, c10d_counts):
    """Run a test in the mode of the test function, and count the outcome."""
    mode = request.function.mode
    if mode not in c10d_counts:
        c10d_counts[mode] = Counter({"passed": 0, "failed": 0, **sorted_out(mode, world.size)[1]})

    def run(name: str) -> None:
        outcome = runner.outcome(name, mode)
        c10d_counts[mode][outcome.kind] += 1
        if outcome.kind == "failed":
            pytest.fail(outcome.text)
        if outcome.kind != "passed":
            pytest.skip(outcome.kind)

    return run


def test_group(name, passes):
    passes(name)


def test_torch_ddp(name, passes):
    passes(name)


def test_our_ddp(name, passes):
    passes(name)


test_group.mode = "group"
test_torch_ddp.mode = "torch_ddp"
test_our_ddp.mode = "our_ddp"
