"""PyTorch's RPC tests on mpidist.rpc, all in one job of 4 ranks. A fixed third of them; all with MPIDIST_CONFORMANCE=all."""

from __future__ import annotations

import os
import re
import traceback

import pytest

from mpidist.comm.launch import from_environment

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.filterwarnings("ignore")]

_PROFILER = "reads events that torch's C++ agent writes into the legacy autograd profiler"
_AUTOGRAD = "needs distributed autograd, which is not built yet"
# Names of tests, as patterns, and why they say nothing of us.
NOT_APPLICABLE = {
    r"test_profiler_.*": _PROFILER,
    r"test_rpc_profiling_.*": _PROFILER,
    r"test_server_process_global_profiler": _PROFILER,
    r"test_async_record_function_.*": _PROFILER,
    r"test_rref_type_(non_)?blocking": _PROFILER,
    r"test_owner_rref_backward|test_user_rref_backward|test_debug_info": _AUTOGRAD,
    r"test_register_rpc_backend_and_set_and_start_rpc_backend|test_verify_backend_options": "asks for torch's registry",
    r"test_duplicate_name": "starts torch's backend with a store of torch's; test_duplicate_name_2 asks the same of init_rpc",
    r"test_use_rpc_pickler": "replaces an object inside torch's module",
    r"test_shutdown_errors": "breaks functions by which torch's shutdown gathers; ours does not gather by calls",
    r"test_cannot_infer_backend_from_options": "its options derive from torch's C++ class",
    r"test_check_failed_messages|test_custom_faulty_messages|test_no_faulty_messages|test_custom_messages_to_delay": (
        "is about messages that torch sends again; MPI loses none, and its settings are the test's own"
    ),
}
_WAIT_ALL = (
    "torch.futures.wait_all gives up early on errors that C++ has set; Python can set none on a torch.futures.Future, "
    "so ours ends with the slowest future"
)
KNOWN_FAILURES = {
    "test_wait_all_exit_early_python": _WAIT_ALL,
    "test_wait_all_exit_early_builtin": _WAIT_ALL,
    "test_wait_all_exit_early_script_function": _WAIT_ALL,
}


def reason_against(name: str) -> str | None:
    """Return why a test does not apply."""
    return next((reason for pattern, reason in NOT_APPLICABLE.items() if re.fullmatch(pattern, name)), None)


def applicable(suite_name: str) -> list[str]:
    """Return the tests of a suite that apply."""
    from tests.conformance import rpc_suite

    return [name for name in rpc_suite.names_of(getattr(rpc_suite, suite_name)) if reason_against(name) is None]


def chosen(suite_name: str) -> list[str]:
    """Return those that run here: the same on every rank and in every run."""
    names = [name for name in applicable(suite_name) if name not in KNOWN_FAILURES]
    return names if os.environ.get("MPIDIST_CONFORMANCE") == "all" else names[::3]


def pytest_generate_tests(metafunc):
    # Only within a job that is large enough: importing torch's suites takes seconds on each rank.
    if "name" in metafunc.fixturenames:
        ranks = from_environment(os.environ).size or 1
        runs = metafunc.config.getoption("--only-mpi", False) and ranks >= 4
        metafunc.parametrize("name", chosen(metafunc.function.suite) if runs else [])


def run_on_all(suite_name, name, group):
    """Run a test; it has passed if it has on all ranks."""
    from tests.conformance import rpc_suite
    from tests.support import agree

    text = ""
    try:
        rpc_suite.run(getattr(rpc_suite, suite_name), name, group)
    except BaseException:
        text = traceback.format_exc()
    agree(group, not text, text)


def test_rpc(name, group):
    run_on_all("RpcSuite", name, group)


def test_faulty(name, group):
    run_on_all("FaultySuite", name, group)


test_rpc.suite = "RpcSuite"
test_faulty.suite = "FaultySuite"
