"""Lightning Fabric on mpidist: ``Fabric(strategy=DDPStrategy())``."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from lightning.fabric import strategies
from lightning.fabric.strategies.strategy import _BackwardSyncControl

from mpidist.ddp.hooks.stages import Hook
from mpidist.ddp.module import DistributedDataParallel
from mpidist.frameworks.environment import MPIEnvironment
from mpidist.frameworks.group import make_default_group, require_mpidist

__all__ = ["DDPStrategy", "MPIEnvironment"]


class DDPStrategy(strategies.DDPStrategy):
    """Fabric's ``DDPStrategy`` with mpidist's ``DistributedDataParallel``, on a group over MPI.

    Collective: a Fabric with it is launched by all ranks of the job.

    Args:
        ddp_comm_state, ddp_comm_hook: Arguments of ``register_comm_hook``, which Lightning's
            Trainer has and its Fabric lacks.
        kwargs: Fabric's arguments of this strategy, and those of
            ``mpidist.ddp.DistributedDataParallel``.

    Raises:
        ValueError: ``process_group_backend`` is not ``"mpidist"``, or ``start_method`` starts
            processes; in ``launch()``, ``devices`` and ``num_nodes`` do not fit the job.
    """

    def __init__(
        self, *, ddp_comm_state: object = None, ddp_comm_hook: Hook | None = None, **kwargs: object
    ) -> None:
        require_mpidist(kwargs, type(self))
        super().__init__(
            **{
                "cluster_environment": MPIEnvironment(),
                "process_group_backend": "mpidist",
                **kwargs,
            }
        )
        self._backward_sync_control = _NoSync()
        self._hook = (ddp_comm_state, ddp_comm_hook)

    def _setup_distributed(self) -> None:
        make_default_group(self._timeout)
        super()._setup_distributed()

    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        """Wrap a module in mpidist's ``DistributedDataParallel``. Collective: over the job."""
        wrapped = DistributedDataParallel(
            module, device_ids=self._determine_ddp_device_ids(), **self._ddp_kwargs
        )
        state, hook = self._hook
        if hook is not None:
            wrapped.register_comm_hook(state, hook)
        return wrapped

    def get_module_state_dict(self, module: torch.nn.Module) -> dict[str, object]:
        """Return the state of the wrapped module."""
        return super().get_module_state_dict(_unwrapped(module))

    def load_module_state_dict(
        self, module: torch.nn.Module, state_dict: Mapping[str, object], strict: bool = True
    ) -> None:
        """Load the state of the wrapped module."""
        super().load_module_state_dict(_unwrapped(module), dict(state_dict), strict)


class _NoSync(_BackwardSyncControl):
    """Implementation of ``fabric.no_backward_sync(model)``."""

    def no_backward_sync(
        self, module: torch.nn.Module, enabled: bool
    ) -> AbstractContextManager[None]:
        if not enabled:
            return contextlib.nullcontext()
        if not isinstance(module, DistributedDataParallel):
            raise TypeError(
                "no_backward_sync needs a module that fabric.setup() has returned; got "
                f"{type(module).__name__}"
            )
        return module.no_sync()


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module
