"""Private names of torch's ``DistributedDataParallel`` that torch and frameworks use.

Names without a meaning here are missing: those of the C++ reducer, of mixed precision and of
delayed parameters. ``docs/data-parallel.md`` lists them with the reason.

Source: ``torch/nn/parallel/distributed.py`` of torch 2.13.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from mpidist.comm.group_types import AnyGroup
from mpidist.comm.resolve_group import native_group
from mpidist.ddp.hooks.default import allreduce_hook, fp16_compress_hook
from mpidist.ddp.hooks.optimizer_overlap import OptimizerHookState, hook_then_optimizer
from mpidist.ddp.hooks.stages import Hook
from mpidist.ddp.logging_data import logging_data
from mpidist.ddp.torch_settings import TorchSettings

Tensor = torch.Tensor

_IGNORED_NAMES = "_ddp_params_and_buffers_to_ignore"


class TorchNames(TorchSettings):
    """torch's private names of a data-parallel module; mixed into ``DistributedDataParallel``."""

    # Defined by the class that this one is mixed into.
    process_group: AnyGroup
    _make_reducer: Callable[..., None]
    register_comm_hook: Callable[[object, Hook | None], None]

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
        """Set ``static_graph``. Collective: over the group, between steps."""
        if self.static_graph:
            warnings.warn("static_graph is set already", stacklevel=2)
            return
        self.settings = dataclasses.replace(self.settings, static_graph=True)
        self._make_reducer()

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
        hook = self.reducer.hook
        self._make_reducer()
        if hook is not None:
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
        """Return settings and sizes by torch's names, without times."""
        return logging_data(self)
