"""Lightning's Trainer on mpidist: ``Trainer(strategy=DDPStrategy())``."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, strategies
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.strategies.strategy import _ForwardRedirection

from mpidist.ddp.module import DistributedDataParallel
from mpidist.frameworks.environment import MPIEnvironment
from mpidist.frameworks.group import make_default_group, refuse

__all__ = ["DDPStrategy", "MPIEnvironment"]


class DDPStrategy(strategies.DDPStrategy):
    """Lightning's ``DDPStrategy`` with mpidist's ``DistributedDataParallel``, on a group over MPI.

    Beside Lightning's: neither ``MPIDIST_REPLACE`` nor ``plugins`` is needed, and ``ddp_comm_hook``
    is registered on the CPU, too, where Lightning's strategy ignores it without a word.

    Collective: a Trainer with it is constructed by all ranks of the job.

    Args:
        kwargs: Lightning's arguments of this strategy, and those of
            ``mpidist.ddp.DistributedDataParallel``.

    Raises:
        ValueError: Another ``process_group_backend`` than ``"mpidist"``, or a ``start_method`` that
            starts processes; when the Trainer starts, ``devices`` and ``num_nodes`` that are not
            the job's.
    """

    model: torch.nn.Module | None

    def __init__(self, **kwargs: Any) -> None:
        refuse(kwargs, type(self))
        super().__init__(
            **{
                "cluster_environment": MPIEnvironment(),
                "process_group_backend": "mpidist",
                **kwargs,
            }
        )
        self._forward_redirection = _Redirection()

    def setup_distributed(self) -> None:
        """Make torch's default group, unless there is one."""
        make_default_group(self._timeout)
        super().setup_distributed()

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(
            model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs
        )

    def _register_ddp_hooks(self) -> None:
        hook, wrapper = self._ddp_comm_hook, self._ddp_comm_wrapper
        if hook is not None:
            assert isinstance(self.model, DistributedDataParallel)
            self.model.register_comm_hook(
                self._ddp_comm_state, hook if wrapper is None else wrapper(hook)
            )

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Arm the reducer for a ``manual_backward``, which runs within the forward pass of DDP."""
        if isinstance(self.model, DistributedDataParallel) and not _is_automatic(
            self.lightning_module
        ):
            prepare_for_backward(self.model, closure_loss)

    def teardown(self) -> None:
        """Unwrap the module."""
        if isinstance(self.model, DistributedDataParallel):
            self.model = self.lightning_module
        super().teardown()


class _Redirection(_ForwardRedirection):
    """Forward passes of manual optimization: their backward passes lie within, so that none shall be awaited behind them."""

    def on_after_inner_forward(
        self, wrapper_module: torch.nn.Module, original_module: LightningModule
    ) -> None:
        if isinstance(wrapper_module, DistributedDataParallel) and not _is_automatic(
            original_module
        ):
            wrapper_module.require_backward_grad_sync = False

    def on_after_outer_forward(
        self, wrapper_module: torch.nn.Module, original_module: LightningModule
    ) -> None:
        if isinstance(wrapper_module, DistributedDataParallel) and not _is_automatic(
            original_module
        ):
            wrapper_module.require_backward_grad_sync = True


def _is_automatic(module: LightningModule | None) -> bool:
    return module is None or bool(module.automatic_optimization)
