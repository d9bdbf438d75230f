"""Private names of torch's ``DistributedDataParallel`` that torch and frameworks use.

Names without a meaning here are missing: those of the C++ reducer, of mixed precision and of
delayed parameters. ``docs/data-parallel.md`` lists them with the reason.

Source: ``torch/nn/parallel/distributed.py`` of torch 2.13.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.nn import Parameter

from mpidist.comm.group_types import AnyGroup, Group
from mpidist.comm.world_group import native_group
from mpidist.ddp.buckets.settings import Settings
from mpidist.ddp.buffer_syncing import BufferSyncing
from mpidist.ddp.hooks.default import allreduce_hook, fp16_compress_hook
from mpidist.ddp.hooks.optimizer_overlap import OptimizerHookState, hook_then_optimizer
from mpidist.ddp.hooks.stages import Hook
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
    _has_cap_list: bool
    _buffer_syncing: BufferSyncing
    _uneven_inputs: UnevenInputs
    _make_reducer: Callable[..., None]
    register_comm_hook: Callable[[object, Hook | None], None]

    # --- settings ---

    mixed_precision = None
    batched_grad_copy = True  # gradients that need a copy are always copied together
    lazy_bucket_allocation = False  # buckets are made once
    broadcast_bucket_size = 250 << 20
    is_multi_device_module = False
    _use_python_reducer = False
    _use_replicated_tensor_module = False
    _lazy_init_ran = True
    _ddp_sink_clone = True

    find_unused_parameters = _of("settings", "find_unused_parameters")
    static_graph = _of("settings", "static_graph")
    gradient_as_bucket_view = _of("settings", "gradient_as_bucket_view")
    skip_all_reduce_unused_params = _of("settings", "skip_unused")
    device_type = _of("device", "type")
    _distributed_rank = _of("_group", "rank")

    @property
    def bucket_bytes_cap(self) -> int:
        """Return the bytes at which the last bucket closes."""
        return self.settings.limits[-1]

    bucket_bytes_cap_default = bucket_bytes_cap

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        """Return the limits of ``bucket_cap_mb_list`` in bytes; empty if there is none."""
        return list(self.settings.limits) if self._has_cap_list else []

    @property
    def _module_parameters(self) -> list[Tensor]:
        return [
            parameter
            for name, parameter in self.module.named_parameters()
            if name not in self.parameters_to_ignore
        ]

    @property
    def _comm_hooks(self) -> list[tuple[Hook, object]]:
        return [] if self.reducer.hook is None else [self.reducer.hook]

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
    def _get_data_parallel_params(
        module: torch.nn.Module, named_params: bool = False
    ) -> Iterator[Parameter | tuple[str, Parameter]]:
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

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
        self._renew_reducer()

    def _update_process_group(self, new_process_group: Any) -> None:
        """Change the group. The hook stays; the caller changes the hook's state.

        Collective: over the new group, between steps; ranks outside of it do nothing.

        Raises:
            TypeError: The group is of another backend.
        """
        if new_process_group is torch.distributed.GroupMember.NON_GROUP_MEMBER:
            return
        self._group = native_group(new_process_group)
        self.process_group = new_process_group
        self._renew_reducer()

    def _renew_reducer(self) -> None:
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

        state = OptimizerHookState(as_functional_optim(optim, *args, **kwargs), optim_params)
        self.register_comm_hook(self.process_group, hook_then_optimizer(allreduce_hook, state))

    def _remove_autograd_hooks(self) -> None:
        """Remove the hooks of the parameters: gradients stay each rank's own from then on."""
        self.reducer._remove_autograd_hooks()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Accept torch's setting; outputs are never cloned here."""
        self._ddp_sink_clone = val

    # --- reports ---

    def _check_reducer_finalized(self) -> None:
        """Raise RuntimeError if a backward pass has begun and not ended."""
        self.reducer._check_reducer_finalized()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Accept torch's rate of runtime statistics, which are not collected here.

        Raises:
            ValueError: The rate is below 1.
        """
        if sample_rate < 1:
            raise ValueError("DDP runtime logging sample rate should be equal or greater than 1")

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
