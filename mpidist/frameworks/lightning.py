"""Lightning's Trainer on mpidist: ``Trainer(strategy=DDPStrategy())``."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, strategies
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.strategies.strategy import _ForwardRedirection

from mpidist.ddp.module import DistributedDataParallel
from mpidist.frameworks.environment import MPIEnvironment
from mpidist.frameworks.group import make_default_group, require_mpidist

__all__ = ["DDPStrategy", "MPIEnvironment"]


class DDPStrategy(strategies.DDPStrategy):
    """Lightning's ``DDPStrategy`` with mpidist's ``DistributedDataParallel``, on a group over MPI.

    Unlike Lightning's strategy it needs neither ``MPIDIST_REPLACE`` nor ``plugins``, and registers
    ``ddp_comm_hook`` on the CPU, too, where Lightning's ignores the hook silently.

    Collective: a Trainer with it is constructed by all ranks of the job.

    Args:
        kwargs: Lightning's arguments of this strategy, and those of
            ``mpidist.ddp.DistributedDataParallel``.

    Raises:
        ValueError: ``process_group_backend`` is not ``"mpidist"``, or ``start_method`` starts
            processes; when the Trainer starts, ``devices`` and ``num_nodes`` do not fit the job.
    """

    model: torch.nn.Module | None

    def __init__(self, **kwargs: object) -> None:
        require_mpidist(kwargs, type(self))
        super().__init__(
            **{
                "cluster_environment": MPIEnvironment(),
                "process_group_backend": "mpidist",
                **kwargs,
            }
        )
        self._forward_redirection = _Redirection()

    def setup_distributed(self) -> None:
        """Initialize torch's default group, unless there is one."""
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
        """Arm the reducer for a ``manual_backward``, which runs within DDP's forward pass."""
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
    """Forward passes of manual optimization, which contain their backward passes.

    No backward pass follows, so that DDP must not arm its reducer after the forward pass.
    """

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
