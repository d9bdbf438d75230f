"""PyTorch's tests of distributed autograd on mpidist.autograd: one job of 4 ranks, a third; MPIDIST_CONFORMANCE=all for all."""

from __future__ import annotations

import os
import traceback

import pytest

from mpidist.comm.launch import from_environment

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.filterwarnings("ignore")]

# Exact names of tests, and why they say nothing of us.
NOT_APPLICABLE = {
    "test_dist_autograd_profiling": "reads events that torch's C++ engine writes into the legacy autograd profiler",
    "test_post_hooks": "hooks on AccumulateGrad nodes: gradients are taken in front of them, so that nothing touches .grad",
    "test_trainer_ps_torchscript_functions": "passes a reference to a script function, whose RRef type is torch's C++ class",
    "test_verify_backend_options": "reads the options of torch's faulty agent",
}


def chosen(suite_name: str) -> list[str]:
    """Return the tests that run here: the same on every rank and in every run."""
    from tests.conformance import autograd_suite, rpc_suite

    names = [name for name in rpc_suite.names_of(getattr(autograd_suite, suite_name)) if name not in NOT_APPLICABLE]
    return names if os.environ.get("MPIDIST_CONFORMANCE") == "all" else names[::3]


def pytest_generate_tests(metafunc):
    # Only within a job that is large enough: importing torch's suites takes seconds on each rank.
    if "name" in metafunc.fixturenames:
        ranks = from_environment(os.environ).size or 1
        runs = metafunc.config.getoption("--only-mpi", False) and ranks >= 4
        metafunc.parametrize("name", chosen(metafunc.function.suite) if runs else [])


def run_on_all(suite_name, name, group):
    """Run a test; it has passed if it has on all ranks."""
    from tests.conformance import autograd_suite
    from tests.support import agree

    text = ""
    try:
        autograd_suite.run(getattr(autograd_suite, suite_name), name, group)
    except BaseException:
        text = traceback.format_exc()
    agree(group, not text, text)


def test_autograd(name, group):
    run_on_all("AutogradSuite", name, group)


def test_sparse(name, group):
    run_on_all("SparseSuite", name, group)


def test_faulty(name, group):
    run_on_all("FaultySuite", name, group)


test_autograd.suite = "AutogradSuite"
test_sparse.suite = "SparseSuite"
test_faulty.suite = "FaultySuite"
