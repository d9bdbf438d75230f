"""Arguments of torch's ``DistributedDataParallel``: their meaning here, or an error."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.torch_version import TorchVersion

from mpidist.comm.group_types import AnyGroup
from mpidist.comm.world_group import default_group

Device: TypeAlias = "int | str | torch.device"


def require_default(mixed_precision: object, delayed: object, hook_of_delayed: object) -> None:
    """Require the default of arguments that mpidist does not support.

    Raises:
        ValueError: One of the arguments is set.
    """
    if mixed_precision is not None:
        raise ValueError(
            "mixed_precision is not supported: use torch.autocast around the forward pass, "
            "bf16_compress_hook for the gradients"
        )
    if delayed is not None or hook_of_delayed is not None:
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce are not supported: "
            "bucket_cap_mb_list and most_buckets say which gradients travel together"
        )


def warn_of_lazy_buckets(requested: bool) -> None:
    """Warn that buckets are allocated once, where they were requested for one pass each."""
    if requested:
        warnings.warn(
            "lazy_bucket_allocation has no effect: buckets are memory that the ranks of a node "
            "share, made once; gradient_as_bucket_view=True saves the second copy",
            stacklevel=3,
        )


def resolve_group(device_mesh: DeviceMesh | None, process_group: AnyGroup) -> AnyGroup:
    """Return the group that the arguments name, or the default one.

    Raises:
        RuntimeError: Both are given, or the mesh has several dimensions; the class and the first
            words are torch's.
        TypeError: ``device_mesh`` is no mesh.
    """
    if device_mesh is None:
        return default_group() if process_group is None else process_group
    if process_group is not None:
        raise RuntimeError(
            "Cannot specify both process_group and device_mesh arguments. Pass one of them"
        )
    if not hasattr(device_mesh, "get_group"):
        raise TypeError(
            "device_mesh must be a torch.distributed.device_mesh.DeviceMesh; got "
            f"{type(device_mesh).__name__}"
        )
    if device_mesh.ndim != 1:
        raise RuntimeError(
            f"Only 1D device mesh is supported, but got {device_mesh.ndim} dimensions: slice it "
            "first (mesh['dp'])"
        )
    return device_mesh.get_group(mesh_dim=0)


def use_local_shards(module: torch.nn.Module, device_mesh: DeviceMesh) -> None:
    """Replace DTensors by their local shards outside of forward passes, for a sliced mesh.

    Source:
        torch's DDP, which does the same for tensor parallelism within data parallelism.
    """
    if device_mesh._get_root_mesh() != device_mesh:
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(module)


def buffer_syncing(
    broadcast_buffers: bool | None, forward_sync_buffers: bool | None
) -> tuple[bool, bool]:
    """Return whether buffers are synchronized (at the start, before each forward pass).

    Source:
        torch 2.13: ``broadcast_buffers=False`` turns both off, ``forward_sync_buffers=False`` the
        second; ``forward_sync_buffers`` overrides ``broadcast_buffers``.
    """
    if broadcast_buffers is not None and TorchVersion(torch.__version__) >= "2.13":
        text = (
            "broadcast_buffers is deprecated since torch 2.13; forward_sync_buffers says the "
            "same of forward passes"
        )
        warnings.warn(text, FutureWarning, stacklevel=3)
    if forward_sync_buffers is not None:
        return True, forward_sync_buffers
    both = True if broadcast_buffers is None else broadcast_buffers
    return both, both


def input_device(
    module: torch.nn.Module,
    device_ids: Sequence[Device] | None,
    output_device: Device | None,
    check_reduction: bool,
) -> torch.device | None:
    """Return the device to which inputs are copied; None to leave them where they are.

    Raises:
        ValueError: ``device_ids`` holds several devices, or the module is not on one GPU.
    """
    if check_reduction:
        warnings.warn(
            "check_reduction is deprecated and has no effect", FutureWarning, stacklevel=3
        )
    if not device_ids and output_device is None:
        return None
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(
            "device_ids must be None or hold one device: one rank, one device; got "
            f"{list(device_ids)}"
        )
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) != 1 or any(device.type == "cpu" for device in devices):
        raise ValueError(
            f"device_ids={device_ids} and output_device={output_device} are for a module on one "
            f"GPU; this one is on {', '.join(sorted(map(str, devices)))}: leave them out"
        )
    (own,) = devices
    wanted = [
        _as_device(own.type, name)
        for name in [*(device_ids or ()), output_device]
        if name is not None
    ]
    if any(device != own for device in wanted):
        raise ValueError(
            f"device_ids={device_ids} and output_device={output_device} must name the module's "
            f"device, {own}"
        )
    return own if device_ids else None


def require_supported(
    module: torch.nn.Module, ignored: Sequence[str] | set[str]
) -> list[tuple[str, torch.nn.Parameter]]:
    """Return names and parameters whose gradients are averaged.

    Raises:
        RuntimeError: No parameter requires a gradient.
        ValueError: A parameter is not initialized yet, or the devices are of several types.
    """
    parameters = [
        (name, parameter) for name, parameter in module.named_parameters() if name not in ignored
    ]
    lazy = [name for name, parameter in parameters if is_lazy(parameter)]
    if lazy:
        raise ValueError(
            f"parameters {', '.join(lazy)} have no shape yet: run one forward pass of the module "
            "first"
        )
    named = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    if not named:
        raise RuntimeError(
            "DistributedDataParallel needs a module with a parameter that requires a gradient"
        )
    if len({parameter.device.type for _, parameter in named}) != 1:
        raise ValueError(
            f"parameters lie on {', '.join(sorted({str(p.device) for _, p in named}))}; one type "
            "of device is needed"
        )
    return named


def communicates_in_backward(module: torch.nn.Module) -> bool:
    """Return whether the module issues collectives in the backward pass, as SyncBatchNorm does."""
    return any(
        isinstance(part, torch.nn.SyncBatchNorm) or getattr(part, "communicates_in_backward", False)
        for part in module.modules()
    )


def sparse_parameters(module: torch.nn.Module) -> set[int]:
    """Return the ids of the parameters whose modules announce sparse gradients.

    Source:
        torch's ``_build_params_for_reducer``.
    """
    embeddings = (
        part
        for part in module.modules()
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag))
    )
    return {id(embedding.weight) for embedding in embeddings if embedding.sparse}


def _as_device(kind: str, name: Device) -> torch.device:
    return torch.device(kind, name) if isinstance(name, int) else torch.device(name)
