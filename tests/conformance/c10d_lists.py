"""Tests of PyTorch's distributed_test that do not apply, by mode, and tests of the long form."""

from __future__ import annotations

import torch

from mpidist import torch_version

_GLOOS_BARRIER = "asks for Gloo's own monitored_barrier: torch refuses every other backend by name"
_LOGGER = "reads _get_ddp_logging_data, which torch's C++ reducer fills"
_TEXTS = (
    "asks for texts of torch's C++ reducer, raised in the pass after the one that lacks a "
    "gradient, and kept in its log"
)
_USED_MAP = "reads reducer._get_local_used_map of torch's C++ reducer"
_NAMES = (
    "calls _build_params_for_reducer and _build_debug_param_to_name_mapping, which prepare "
    "torch's C++ reducer"
)
_NO_READER = "calls or reads {}, which neither torch nor a framework does on a module"
_BUFFER_HOOK = "registers a hook for buffers, which torch's module alone has"

_OF_GROUP = {
    "test_monitored_barrier_allreduce_hang": _GLOOS_BARRIER,
    "test_monitored_barrier_allreduce_hang_wait_all_ranks": _GLOOS_BARRIER,
    "test_monitored_barrier_failure_order": _GLOOS_BARRIER,
    "test_monitored_barrier_gloo": _GLOOS_BARRIER,
    "test_monitored_barrier_gloo_rank_0_timeout": _GLOOS_BARRIER,
    "test_monitored_barrier_gloo_subgroup": _GLOOS_BARRIER,
    "test_monitored_barrier_wait_all_ranks": _GLOOS_BARRIER,
}
_OF_OUR_DDP = {
    "test_ddp_broadcast_buffer_via_hook": _BUFFER_HOOK,
    "test_ddp_bucket_cap_mb_list": _NO_READER.format("bucket_bytes_cap_list"),
    "test_ddp_buffer_hook_allreduce": _BUFFER_HOOK,
    "test_ddp_buffer_hook_allreduce_return_future": _BUFFER_HOOK,
    "test_ddp_build_debug_param_to_name_mapping": _NAMES,
    "test_ddp_build_debug_param_to_name_mapping_requires_grad": _NAMES,
    "test_ddp_comm_hook_logging": _LOGGER,
    "test_ddp_control_flow_different_across_ranks": _USED_MAP,
    "test_ddp_control_flow_same_across_ranks": _USED_MAP,
    "test_ddp_has_finalized": _NO_READER.format("_check_reducer_finalized"),
    "test_ddp_logging_data_cpu": _LOGGER,
    "test_ddp_logging_data_gpu": _LOGGER,
    "test_ddp_multiple_nested_unused_params_err_ignore_params": _TEXTS,
    "test_ddp_multiple_nested_unused_params_error": _TEXTS,
    "test_ddp_native_mixed_precision_ignored_params": "reads _mp_param and _fp_param, which "
    "torch's module gives parameters",
    "test_ddp_python_error_logged": _LOGGER,
    "test_ddp_remove_autograd_hooks": _NO_READER.format("_remove_autograd_hooks"),
    "test_ddp_sink_noclone": _NO_READER.format("_set_ddp_sink_clone"),
    "test_ddp_unused_params_rebuild_buckets_exception": _TEXTS,
    "test_detect_ddp_is_actually_static": "reads reducer._ddp_graph_static of torch's C++ reducer",
    "test_different_graph_across_ranks": _LOGGER,
    "test_get_data_parallel_params": _NO_READER.format("_get_data_parallel_params"),
    "test_invalid_static_graph": _TEXTS,
    "test_skip_all_reduce_unused_parameters": _LOGGER,
    "test_static_graph_api_cpu": _LOGGER,
}
NOT_APPLICABLE = {"group": _OF_GROUP, "torch_ddp": {}, "our_ddp": _OF_OUR_DDP}
# Failing tests, with reasons.
_OF_ONE_THREAD = (
    "wants events that begin in one thread and end in another, as Gloo's do; torch writes the end "
    "of one into memory that it has freed if the profiler ends first, so ours stay within a thread"
)
_ASYNC = {"test_ddp_profiling_torch_profiler": _OF_ONE_THREAD}
if torch_version.numbers(torch.__version__) < (2, 13):
    _ASYNC["test_ddp_profiling_autograd_profiler"] = _OF_ONE_THREAD
KNOWN_FAILURES: dict[str, dict[str, str]] = {"group": {}, "torch_ddp": _ASYNC, "our_ddp": _ASYNC}
# Not in CI: each takes seconds.
LONG = {
    **dict.fromkeys(
        ("test_barrier_cuda", "test_barrier_full_group_cuda", "test_barrier_group_cuda"),
        "sleeps as its twin for the host does",
    ),
    "test_average_parameters": "Gloo fails it on the host, too, after two timeouts",
    "test_barrier_timeout_full_group": "waits for a timeout",
    "test_barrier_timeout_global": "waits for a timeout",
    "test_barrier_timeout_group": "waits for a timeout",
    "test_batch_isend_irecv_mixed_backend_err": "needs a GPU: Gloo fails it, too, after a timeout",
    "test_ddp_hook_parity_powerSGD": "300 steps of it",
    "test_ddp_hook_parity_post_localSGD": "Gloo fails it on the host, too",
    "test_ddp_apply_optim_in_backward": "a million parameters, six optimizers",
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false": "a million parameters, six "
    "optimizers",
    "test_ddp_compile_static_graph": "two compilers at work in each rank",
    "test_ddp_uneven_inputs": "1500 passes",
}
