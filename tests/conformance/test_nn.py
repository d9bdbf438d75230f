"""PyTorch's tests of remote modules on mpidist.nn, in one job of at least 3 ranks."""

from __future__ import annotations

import os

import pytest

from mpidist.comm.mpi.launcher_env import from_environment

pytestmark = [pytest.mark.mpi(min_size=3), pytest.mark.filterwarnings("ignore")]

# Names of tests that do not apply, with reasons.
NOT_APPLICABLE = {
    "test_unsupported_methods": (
        "asks that state_dict, load_state_dict, parameters and named_parameters raise, too; "
        "tests/nn asks it of the others"
    ),
}


def chosen(suite_name: str) -> list[str]:
    """Return the tests of this run."""
    from tests.conformance import nn_suite, suite

    return [
        name for name in suite.names_of(getattr(nn_suite, suite_name)) if name not in NOT_APPLICABLE
    ]


def pytest_generate_tests(metafunc):
    # Only in a job with enough ranks, because the import of torch's suites takes seconds on each
    # rank.
    if "name" in metafunc.fixturenames:
        runs = (
            metafunc.config.getoption("--only-mpi", False)
            and (from_environment(os.environ).size or 1) >= 3
        )
        metafunc.parametrize("name", chosen(metafunc.function.suite) if runs else [])


def test_remote_module(name, group):
    from tests.conformance import nn_suite, suite

    suite.run_on_all(nn_suite.RemoteModuleSuite, name, group)


def test_three_workers(name, group):
    from tests.conformance import nn_suite, suite

    suite.run_on_all(nn_suite.ThreeWorkersSuite, name, group)


@pytest.mark.gpu
def test_cuda(name, group):
    from tests.conformance import nn_suite, suite

    suite.run_on_all(nn_suite.CudaSuite, name, group)


test_remote_module.suite = "RemoteModuleSuite"
test_three_workers.suite = "ThreeWorkersSuite"
test_cuda.suite = "CudaSuite"
