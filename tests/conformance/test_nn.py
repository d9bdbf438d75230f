"""PyTorch's tests of remote modules on mpidist.nn, in one job of at least 3 ranks."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.mpi(min_size=3), pytest.mark.filterwarnings("ignore")]

_SCRIPT = "compiles a remote module by TorchScript, which torch has deprecated"
# Names of tests that do not apply, with reasons.
NOT_APPLICABLE = {
    "test_forward_async_script": _SCRIPT,
    "test_forward_sync_script": _SCRIPT,
    "test_remote_module_py_pickle_not_supported_script": _SCRIPT,
    "test_send_remote_module_over_the_wire_script_not_supported": _SCRIPT,
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


def names_at(function, size: int) -> list[str]:
    """Return the tests of a function in a job of ``size`` ranks."""
    return chosen(function.suite) if size >= 3 else []


def test_remote_module(name, group):
    from tests.conformance import nn_suite, suite

    suite.run_on_all(nn_suite.RemoteModuleSuite, name, group)


def test_three_workers(name, group):
    from tests.conformance import nn_suite, suite

    suite.run_on_all(nn_suite.ThreeWorkersSuite, name, group)


test_remote_module.suite = "RemoteModuleSuite"
test_three_workers.suite = "ThreeWorkersSuite"
