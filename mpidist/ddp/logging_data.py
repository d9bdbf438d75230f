"""Logging data of a data-parallel module: settings and sizes by torch's names, as plain values."""

from __future__ import annotations

from typing import Any

import torch

# Names of dtypes in torch's C++ logs.
_DTYPE_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
}


def logging_data(ddp: Any) -> dict[str, object]:
    """Return settings and sizes of a module as torch's DDP logs them.

    Args:
        ddp: A ``DistributedDataParallel``.

    Source:
        ``torch/csrc/distributed/c10d/logger.cpp``, for names and texts; without its times.
    """
    parameters, reducer = ddp.reducer.parameters, ddp.reducer
    buckets, hook = reducer.layout.plan, reducer.hook
    sizes = ", ".join(str(sum(parameters[place].nbytes for place in places)) for places in buckets)
    data = {
        "world_size": ddp._group.size,
        "rank": ddp._group.rank,
        "module_name": type(ddp.module).__name__,
        "device_ids": ", ".join(map(str, ddp.device_ids or ())),
        "output_device": -1 if getattr(ddp, "output_device", None) is None else ddp.output_device,
        "broadcast_buffers": int(ddp.forward_sync_buffers),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "static_graph": int(ddp.static_graph),
        "backend_name": "mpidist",
        "dtypes": ", ".join(sorted({_dtype_name(parameter.dtype) for parameter in parameters})),
        "total_parameter_size_bytes": sum(parameter.nbytes for parameter in parameters),
        "num_parameter_tensors": len(parameters),
        "bucket_sizes": sizes,
        "num_buckets_reduced": len(buckets),
        "has_rebuilt_buckets": int(ddp._has_rebuilt_buckets),
        "has_sync_bn": int(
            any("SyncBatchNorm" in type(part).__name__ for part in ddp.module.modules())
        ),
    }
    if ddp._has_rebuilt_buckets:
        data["rebuilt_bucket_sizes"] = sizes
        data["rebuilt_per_bucket_param_indices"] = ", ".join(
            " ".join(map(str, places)) for places in buckets
        )
    if "_authoritative_rank" in vars(ddp):
        data["join_uneven_inputs"] = 1
    if hook is not None:
        data["comm_hook"] = getattr(hook[0], "__qualname__", type(hook[0]).__qualname__)
    return data


def _dtype_name(dtype: torch.dtype) -> str:
    return _DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))
