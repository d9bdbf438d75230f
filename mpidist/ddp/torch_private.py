"""Private names of torch's ``DistributedDataParallel`` that torch and frameworks use.

Names without a meaning here are missing: those of the C++ reducer, of mixed precision and of
delayed parameters. ``docs/data-parallel.md`` lists them with the reason.

Source: ``torch/nn/parallel/distributed.py`` of torch 2.13.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import torch

from mpidist.comm.group_types import AnyGroup, Group
from mpidist.ddp.buckets.settings import Settings
from mpidist.ddp.buffer_syncing import BufferSyncing
from mpidist.ddp.hooks.default import allreduce_hook, fp16_compress_hook
from mpidist.ddp.hooks.grad_bucket import GradBucket
from mpidist.ddp.hooks.stages import BucketFuture, Hook, applied, in_order
from mpidist.ddp.join import UnevenInputs
from mpidist.ddp.reducer import Reducer
from mpidist.ddp.torch_arguments import Device

Tensor = torch.Tensor

_IGNORED_NAMES = "_ddp_params_and_buffers_to_ignore"
# Names of dtypes in torch's C++ logs.
_DTYPE_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
}


def _of(part: str, name: str) -> property:
    """Return a property that reads an attribute of one of the module's parts."""
    return property(attrgetter(f"{part}.{name}"))


def _settable_of(part: str, name: str) -> property:
    """Return a property that reads and sets an attribute of one of the module's parts."""

    def change(self: TorchNames, value: object) -> None:
        setattr(getattr(self, part), name, value)

    return _of(part, name).setter(change)


class TorchNames:
    """Interface of torch's module beside its public calls: its settings and private names.

    ``DistributedDataParallel`` is one by these names, which torch and frameworks call on any
    data-parallel module; they are stated in terms of the attributes below.

    Attributes:
        module: The module within.
        reducer: Its reducer.
        settings: The reducer's.
        process_group: The group as the user gave it.
        parameters_to_ignore: Names of parameters and buffers that stay each rank's own.
        device: Device of the parameters.
        device_ids: This rank's one GPU, to which inputs are moved, in a list; or None.
        output_device: The same GPU, or None.
    """

    module: torch.nn.Module
    reducer: Reducer
    settings: Settings
    process_group: AnyGroup
    parameters_to_ignore: set[str]
    device: torch.device
    device_ids: list[Device] | None
    output_device: Device | None
    _group: Group
    _buffer_syncing: BufferSyncing
    _uneven_inputs: UnevenInputs
    _make_reducer: Callable[..., None]
    register_comm_hook: Callable[[object, Hook | None], None]

    # --- settings ---

    mixed_precision = None
    broadcast_bucket_size = 250 << 20
    find_unused_parameters = _of("settings", "find_unused_parameters")
    static_graph = _of("settings", "static_graph")
    gradient_as_bucket_view = _of("settings", "gradient_as_bucket_view")
    skip_all_reduce_unused_params = _of("settings", "skip_unused")

    @property
    def bucket_bytes_cap(self) -> int:
        """Return the bytes at which the last bucket closes."""
        return self.settings.limits[-1]

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return bool(self.reducer.layout.is_rebuilt)

    # --- buffers ---

    forward_sync_buffers = _settable_of("_buffer_syncing", "is_enabled")
    broadcast_buffers = forward_sync_buffers  # its former name in torch
    require_forward_param_sync = _settable_of("_buffer_syncing", "is_due")
    _authoritative_rank = _of("_uneven_inputs", "authoritative_rank")

    # --- parameters ---

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: torch.nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Exclude parameters and buffers, by name, from DDP before the module is wrapped."""
        setattr(module, _IGNORED_NAMES, params_and_buffers_to_ignore)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in params_and_buffers_to_ignore:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    # --- changes ---

    def _set_static_graph(self) -> None:
        """Set ``static_graph``; the hook stays. Collective: over the group, between steps."""
        if self.static_graph:
            warnings.warn("static_graph is set already", stacklevel=2)
            return
        self.settings = dataclasses.replace(self.settings, static_graph=True)
        hook = self.reducer.hook
        self._make_reducer()
        # The hook of exact averages belongs to a reducer: the new one has its own.
        if hook is not None and self.reducer.hook is None:
            self.reducer.register_hook(*hook)

    def _register_builtin_comm_hook(self, comm_hook_type: object) -> None:
        """Register the hook that ``torch.distributed.BuiltinCommHookType`` names.

        Raises:
            TypeError: ``comm_hook_type`` is of another type.
        """
        hooks = {"ALLREDUCE": allreduce_hook, "FP16_COMPRESS": fp16_compress_hook}
        name = getattr(comm_hook_type, "name", None)
        if name not in hooks:
            raise TypeError(
                "comm_hook_type must be a torch.distributed.BuiltinCommHookType; got "
                f"{comm_hook_type!r}"
            )
        self.register_comm_hook(self.process_group, hooks[name])

    def _register_fused_optim(
        self,
        optim: type,
        *args: object,
        optim_params: Iterable[Tensor] | None = None,
        **kwargs: object,
    ) -> None:
        """Step parameters by an optimizer of torch as soon as their bucket is averaged.

        Args:
            optim: A class of ``torch.optim``.
            args: Positional arguments of the class after the parameters.
            optim_params: The parameters; None for all.
            kwargs: Keyword arguments of the class.

        Raises:
            ValueError: torch has no functional form of the class.
        """
        from torch.distributed.optim import as_functional_optim

        functional = as_functional_optim(optim, *args, **kwargs)
        chosen = None if optim_params is None else set(optim_params)

        @in_order
        def allreduce_then_optimizer(group: AnyGroup, bucket: GradBucket) -> BucketFuture:
            def step(buffer: Tensor) -> Tensor:
                for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
                    if chosen is None or parameter in chosen:
                        functional.step_param(parameter, grad)
                return buffer

            return allreduce_hook(group, bucket).then(applied(step, bucket.buffer().numel()))

        self.register_comm_hook(self.process_group, allreduce_then_optimizer)

    # --- reports ---

    def _get_ddp_logging_data(self) -> dict[str, object]:
        """Return settings and sizes by torch's names, without times.

        Source: ``torch/csrc/distributed/c10d/logger.cpp``, for names and texts.
        """
        parameters, reducer = self.reducer.parameters, self.reducer
        buckets, hook = reducer.layout.plan, reducer.hook
        sizes = ", ".join(
            str(sum(parameters[place].nbytes for place in places)) for places in buckets
        )
        data: dict[str, object] = {
            "world_size": self._group.size,
            "rank": self._group.rank,
            "module_name": type(self.module).__name__,
            "device_ids": ", ".join(map(str, self.device_ids or ())),
            "output_device": -1 if self.output_device is None else self.output_device,
            "broadcast_buffers": int(self.forward_sync_buffers),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "backend_name": "mpidist",
            "dtypes": ", ".join(sorted({_dtype_name(parameter.dtype) for parameter in parameters})),
            "total_parameter_size_bytes": sum(parameter.nbytes for parameter in parameters),
            "num_parameter_tensors": len(parameters),
            "bucket_sizes": sizes,
            "num_buckets_reduced": len(buckets),
            "has_rebuilt_buckets": int(self._has_rebuilt_buckets),
            "has_sync_bn": int(
                any("SyncBatchNorm" in type(part).__name__ for part in self.module.modules())
            ),
        }
        if self._has_rebuilt_buckets:
            data["rebuilt_bucket_sizes"] = sizes
            data["rebuilt_per_bucket_param_indices"] = ", ".join(
                " ".join(map(str, places)) for places in buckets
            )
        if self._authoritative_rank is not None:
            data["join_uneven_inputs"] = 1
        if hook is not None:
            data["comm_hook"] = getattr(hook[0], "__qualname__", type(hook[0]).__qualname__)
        return data


def _dtype_name(dtype: torch.dtype) -> str:
    return _DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))
