"""PyTorch's RPC tests on mpidist.rpc, all in one job of 4 ranks.

A fixed third of them; all with MPIDIST_CONFORMANCE=all.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.filterwarnings("ignore")]

_PROFILER = "reads events that torch's C++ agent writes into the legacy autograd profiler"
_PROFILER_TESTS = (
    "test_async_record_function_cbs_jit_call",
    "test_async_record_function_double_end_callbacks",
    "test_async_record_function_legacy",
    "test_profiler_export_trace",
    "test_profiler_remote_events_profiled",
    "test_profiler_remote_events_profiled_single_threaded",
    "test_profiler_rpc_key_names",
    "test_profiler_rpc_memory",
    "test_profiler_rpc_record_shapes",
    "test_profiler_with_async_rpc_builtin",
    "test_profiler_with_async_rpc_builtin_single_threaded",
    "test_profiler_with_async_rpc_udf",
    "test_profiler_with_async_rpc_udf_single_threaded",
    "test_profiler_with_autograd_context",
    "test_profiler_with_autograd_context_single_threaded",
    "test_profiler_with_remote_builtin",
    "test_profiler_with_remote_builtin_single_threaded",
    "test_profiler_with_remote_udf",
    "test_profiler_with_remote_udf_single_threaded",
    "test_profiler_with_script_async_rpc",
    "test_profiler_with_script_async_rpc_single_threaded",
    "test_profiler_with_script_remote_rpc",
    "test_profiler_with_script_remote_rpc_single_threaded",
    "test_profiler_with_script_sync_rpc",
    "test_profiler_with_script_sync_rpc_single_threaded",
    "test_profiler_with_sync_rpc_builtin",
    "test_profiler_with_sync_rpc_builtin_single_threaded",
    "test_profiler_with_sync_rpc_udf",
    "test_profiler_with_sync_rpc_udf_single_threaded",
    "test_rpc_profiling_async_function",
    "test_rpc_profiling_async_function_single_threaded",
    "test_rpc_profiling_remote_record_function",
    "test_rref_type_blocking",
    "test_rref_type_non_blocking",
    "test_server_process_global_profiler",
)
# Names of tests that do not apply, with reasons.
NOT_APPLICABLE = {
    **dict.fromkeys(_PROFILER_TESTS, _PROFILER),
    "test_register_rpc_backend_and_set_and_start_rpc_backend": (
        "registers a backend in torch's rpc.backend_registry, and replaces torch's own "
        "api._set_and_start_rpc_agent"
    ),
    "test_verify_backend_options": (
        "reads torch's rpc.backend_registry.BackendType.FAULTY_TENSORPIPE and num_fail_sends of "
        "its faulty agent's options"
    ),
    "test_duplicate_name": (
        "calls torch's private rpc._init_rpc_backend with a store of torch's; "
        "test_duplicate_name_2 asks the same of init_rpc"
    ),
    "test_use_rpc_pickler": "reads torch's private api._default_pickler, which "
    "api._use_rpc_pickler of torch's module replaces",
    "test_shutdown_errors": (
        "replaces torch's private api._broadcast_to_followers, and asks for the words of the "
        "gathering that is torch's shutdown"
    ),
}
_WAIT_ALL = (
    "torch.futures.wait_all gives up early on errors that C++ has set; Python can set none on a "
    "torch.futures.Future, "
    "so ours ends with the slowest future"
)
KNOWN_FAILURES = {
    "test_wait_all_exit_early_python": _WAIT_ALL,
    "test_wait_all_exit_early_builtin": _WAIT_ALL,
    "test_wait_all_exit_early_script_function": _WAIT_ALL,
}

# Wait for timeouts of seconds each; tests/rpc have short ones of the same kinds.
LONG = (
    "test_rpc_timeouts",
    "test_rpc_builtin_timeout",
    "test_rpc_script_timeout",
    "test_udf_remote_message_delay_timeout",
    "test_udf_remote_message_delay_timeout_to_self",
    "test_remote_message_builtin_delay_timeout",
    "test_remote_message_builtin_delay_timeout_to_self",
    "test_remote_message_script_delay_timeout",
    "test_remote_message_script_delay_timeout_to_self",
    "test_rref_to_here_timeout",
)


def reason_against(name: str) -> str | None:
    """Return the reason for which a test does not apply; None if it applies."""
    return NOT_APPLICABLE.get(name)


def applicable(suite_name: str) -> list[str]:
    """Return the applicable tests of a suite."""
    from tests.conformance import rpc_suite, suite

    return [
        name
        for name in suite.names_of(getattr(rpc_suite, suite_name))
        if reason_against(name) is None
    ]


def chosen(suite_name: str) -> list[str]:
    """Return the tests of this run."""
    from tests.conformance import suite

    names = [name for name in applicable(suite_name) if name not in KNOWN_FAILURES]
    return suite.selected(names, LONG)


def names_at(function, size: int) -> list[str]:
    """Return the tests of a function in a job of ``size`` ranks."""
    return chosen(function.suite) if size >= 4 else []


def test_rpc(name, group):
    from tests.conformance import rpc_suite, suite

    suite.run_on_all(rpc_suite.RpcSuite, name, group)


def test_faulty(name, group):
    from tests.conformance import rpc_suite, suite

    suite.run_on_all(rpc_suite.FaultySuite, name, group)


test_rpc.suite = "RpcSuite"
test_faulty.suite = "FaultySuite"
