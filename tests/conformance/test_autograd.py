"""PyTorch's tests of distributed autograd on mpidist.autograd, in one job of 4 ranks.

A fixed third of the tests runs; all with MPIDIST_CONFORMANCE=all.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.filterwarnings("ignore")]

# Names of tests that do not apply, with reasons.
NOT_APPLICABLE = {
    "test_dist_autograd_profiling": "reads events that torch's C++ engine writes into the legacy "
    "autograd profiler",
    "test_no_grad_copy": "asserts that a gradient's memory becomes the sum: whether it has other "
    "owners is not known without a count of references, which Python 3.14 does not keep, so it is "
    "copied",
    "test_no_grad_copy_sparse": "the same",
    "test_post_hooks": "hooks on AccumulateGrad nodes: gradients are taken in front of them, so "
    "that nothing touches .grad",
    "test_trainer_ps_torchscript_functions": "passes a reference to a script function, whose RRef "
    "type is torch's C++ class",
    "test_verify_backend_options": "reads the options of torch's faulty agent",
}

# A thousand passes.
LONG = ("test_multiple_backward_sparse",)


def chosen(suite_name: str) -> list[str]:
    """Return the tests of this run."""
    from tests.conformance import autograd_suite, suite

    return suite.selected(
        [
            name
            for name in suite.names_of(getattr(autograd_suite, suite_name))
            if name not in NOT_APPLICABLE
        ],
        LONG,
    )


def names_at(function, size: int) -> list[str]:
    """Return the tests of a function in a job of ``size`` ranks."""
    return chosen(function.suite) if size >= 4 else []


def test_autograd(name, group):
    from tests.conformance import autograd_suite, suite

    suite.run_on_all(autograd_suite.AutogradSuite, name, group)


def test_sparse(name, group):
    from tests.conformance import autograd_suite, suite

    suite.run_on_all(autograd_suite.SparseSuite, name, group)


def test_faulty(name, group):
    from tests.conformance import autograd_suite, suite

    suite.run_on_all(autograd_suite.FaultySuite, name, group)


test_autograd.suite = "AutogradSuite"
test_sparse.suite = "SparseSuite"
test_faulty.suite = "FaultySuite"
