"""PyTorch's distributed_test at 2, 3 and 4 ranks: our group, torch's DDP on it, our DDP in torch's place.

Here each test runs at one of the three numbers of ranks, as a checksum of its name says; with
MPIDIST_CONFORMANCE=all at all three. One that fails is repeated on Gloo, and excluded if Gloo fails
it, too.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from mpidist.comm.mpi.launcher_env import from_environment
from tests.conformance.c10d_lists import KNOWN_FAILURES, LONG, NOT_APPLICABLE

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.every_case,
    pytest.mark.filterwarnings("ignore"),
]
_SHORT = os.environ.get("MPIDIST_CONFORMANCE") != "all"


def sorted_out(mode: str, size: int, short: bool = _SHORT) -> tuple[list[str], Counter[str]]:
    """Return the tests of a mode that are to run at ``size`` ranks, and the number of others by reason."""
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


def pytest_generate_tests(metafunc):
    # Only within a job of the right size: importing torch's suites takes seconds on each rank.
    if "name" in metafunc.fixturenames:
        size = from_environment(os.environ).size or 1
        runs = metafunc.config.getoption("--only-mpi", False) and size in (2, 3, 4)
        metafunc.parametrize("name", sorted_out(metafunc.function.mode, size)[0] if runs else [])


@pytest.fixture(scope="module")
def runner(world):
    """What runs the tests, on a group of its own."""
    from tests.conformance import c10d_suite

    group = world.clone("verdicts")
    yield c10d_suite.Runner(group)
    group.close()


@pytest.fixture
def passes(runner, world, request, c10d_counts):
    """Run a test of the function's mode, and count it."""
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
