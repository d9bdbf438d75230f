"""Names of torch's ``DistributedDataParallel`` that frameworks, and torch itself, use: each in terms of ours.

What has no meaning here is not here: the C++ reducer's fields, mixed precision's, delayed
parameters'. ``docs/data-parallel.md`` lists those with the reason.

Source: ``torch/nn/parallel/distributed.py`` of torch 2.13.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable

from mpidist.comm.resolve_group import native_group
from mpidist.ddp.buffer_syncing import BufferSyncing
from mpidist.ddp.hooks.default import allreduce_hook, fp16_compress_hook
from mpidist.ddp.hooks.optimizer_overlap import OptimizerHookState, hook_then_optimizer
from mpidist.ddp.join import TorchJoinHook
from mpidist.ddp.logging_data import logging_data

Tensor = torch.Tensor


class TorchNames(BufferSyncing, Joinable):
    """torch's private and lesser names of a data-parallel module."""

    # Mixed into one class, whose attributes these are.
    module: torch.nn.Module
    settings: Any
    reducer: Any
    process_group: Any
    parameters_to_ignore: set[str]
    device: torch.device
    _group: Any
    _make_reducer: Callable[..., None]
    register_comm_hook: Callable[[Any, Any], None]

    mixed_precision = None
    batched_grad_copy = True  # gradients that need a copy are always copied together
    broadcast_bucket_size = 250 << 20
    is_multi_device_module = False
    _use_python_reducer = False
    _use_replicated_tensor_module = False
    _lazy_init_ran = True
    _ddp_sink_clone = True

    # --- settings ---

    @property
    def broadcast_buffers(self) -> bool:
        """Return ``forward_sync_buffers``, by its former name."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def find_unused_parameters(self) -> bool:
        """Return the argument."""
        return bool(self.settings.find_unused_parameters)

    @property
    def static_graph(self) -> bool:
        """Return the argument, or True after ``_set_static_graph``."""
        return bool(self.settings.static_graph)

    @property
    def gradient_as_bucket_view(self) -> bool:
        """Return the argument."""
        return bool(self.settings.gradient_as_bucket_view)

    @property
    def skip_all_reduce_unused_params(self) -> bool:
        """Return the argument."""
        return bool(self.settings.skip_unused)

    @property
    def bucket_bytes_cap(self) -> int:
        """Return the bytes at which all but the first buckets close."""
        return int(self.settings.limits[-1])

    bucket_bytes_cap_default = bucket_bytes_cap

    @property
    def device_type(self) -> str:
        """Return the parameters' type of device."""
        return self.device.type

    @property
    def _module_parameters(self) -> list[Tensor]:
        return [
            parameter
            for name, parameter in self.module.named_parameters()
            if name not in self.parameters_to_ignore
        ]

    @property
    def _comm_hooks(self) -> list[tuple[Any, Any]]:
        return [] if self.reducer.hook is None else [self.reducer.hook]

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return bool(self.reducer.layout.is_rebuilt)

    @property
    def _distributed_rank(self) -> int:
        return int(self._group.rank)

    @staticmethod
    def _get_data_parallel_params(
        module: torch.nn.Module, named_params: bool = False
    ) -> Iterator[Any]:
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: torch.nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Leave parameters and buffers, by name, to each rank; before the module is wrapped."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in params_and_buffers_to_ignore:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    # --- changes ---

    def _set_static_graph(self) -> None:
        """Set ``static_graph``. Collective: over the group, between steps."""
        if self.static_graph:
            warnings.warn("static_graph is set already", stacklevel=2)
            return
        self.settings = dataclasses.replace(self.settings, static_graph=True)
        self._make_reducer()

    def _update_process_group(self, new_process_group: Any) -> None:
        """Go on with another group; the hook stays, and its state is the caller's to change.

        Collective: over the new group, between steps; ranks outside of it do nothing.

        Raises:
            TypeError: A group of another backend.
        """
        if new_process_group is torch.distributed.GroupMember.NON_GROUP_MEMBER:
            return
        self._group = native_group(new_process_group)
        self.process_group = new_process_group
        hook = self.reducer.hook
        self._make_reducer()
        if hook is not None:
            self.reducer.register_hook(*hook)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Register the hook that ``torch.distributed.BuiltinCommHookType`` names.

        Raises:
            TypeError: Another type.
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
        self, optim: type, *args: Any, optim_params: Iterable[Tensor] | None = None, **kwargs: Any
    ) -> None:
        """Step parameters with an optimizer of torch's as soon as their bucket is averaged.

        Args:
            optim: A class of ``torch.optim``.
            args: Its arguments behind the parameters.
            optim_params: The parameters; None for all.
            kwargs: Its arguments by name.

        Raises:
            ValueError: torch has no functional form of that class.
        """
        from torch.distributed.optim import as_functional_optim

        state = OptimizerHookState(as_functional_optim(optim, *args, **kwargs), optim_params)
        self.register_comm_hook(self.process_group, hook_then_optimizer(allreduce_hook, state))

    def _remove_autograd_hooks(self) -> None:
        """Take the hooks off the parameters: gradients stay each rank's own from then on."""
        self.reducer._remove_autograd_hooks()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Accept torch's choice whether outputs are cloned; here they never are."""
        self._ddp_sink_clone = val

    # --- torch's Join ---

    def join_hook(self, **kwargs: Any) -> TorchJoinHook:
        """Return what torch's ``Join`` runs on a rank without inputs; see ``join`` for ``divide_by_initial_world_size``."""
        self._divides_by_initial = kwargs.get("divide_by_initial_world_size", True)
        return TorchJoinHook(self, self._group)

    @property
    def join_device(self) -> torch.device:
        """Return the device of torch's ``Join`` for its own collectives."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """Return the group of torch's ``Join`` for its own collectives."""
        return self.process_group

    # --- reports ---

    def _check_reducer_finalized(self) -> None:
        """Raise if a backward pass has begun and not ended."""
        self.reducer._check_reducer_finalized()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Accept torch's rate of its runtime statistics, which are not collected here.

        Raises:
            ValueError: It is below 1.
        """
        if sample_rate < 1:
            raise ValueError("DDP runtime logging sample rate should be equal or greater than 1")

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return settings and sizes, by torch's names; no times, which a profiler has."""
        return logging_data(self)
