"""``SyncBatchNorm``: batch normalisation by the statistics of all ranks' batches, on CPU and CUDA.

The forward pass makes one all-gather of 2 + 2·C numbers per rank, the backward pass one all-reduce
of 2·C numbers, both in float64. The statistics have the same bits on all ranks. torch's own kernels
do the elementwise work.

Letters: C channels; N values per channel in the batches of all ranks.

Source: Ioffe, Szegedy, "Batch Normalization" (2015), section 3; names and meanings are those of
``torch.nn.SyncBatchNorm``, which has no CPU path.
"""

from __future__ import annotations

import copy
import warnings
from typing import TypeGuard

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from mpidist.comm.consistency import values_that_differ
from mpidist.comm.group_types import AnyGroup, Group
from mpidist.comm.world_group import native_group
from mpidist.dynamo import untraced
from mpidist.nn import batch_kernels
from mpidist.nn.batch_function import Normalize, gather_statistics
from mpidist.nn.batch_statistics import Statistics

Tensor = torch.Tensor


# A converted layer keeps the hooks of the original layer.
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation of each channel by mean and variance over all ranks of a group.

    In evaluation mode, and on a group of one rank, the layer is ``BatchNorm``. Batches may differ
    in size between ranks, and be empty on some; if all are empty, the running statistics stay.
    Gradients of ``weight`` and ``bias`` are this rank's own part, which ``DistributedDataParallel``
    averages. The state_dict is that of ``BatchNorm``. The class is no subclass of
    ``torch.nn.SyncBatchNorm``, which torch's DDP refuses on the CPU.

    Collective: forward passes in training mode, and their backward passes if the input needs a
    gradient; all ranks of the group call them in one order. Within a ``DistributedDataParallel``
    whose ranks may use different parameters (``find_unused_parameters``, ``static_graph``), the
    buckets are sent after the last of these passes.

    Args:
        num_features: C, the size of the input's second dimension.
        eps: Added to the variance.
        momentum: Weight of a new batch in the running statistics; None for the mean over all
            batches.
        affine: Create a weight and a bias per channel.
        track_running_stats: Keep running statistics.
        process_group: A native group, or a torch group on the backend ``mpidist``; None for the
            default.
        device: Device of the parameters and buffers.
        dtype: Dtype of the parameters and buffers.
        bias: With ``affine``: create a bias, too.

    Raises:
        ValueError: In training, on all ranks: an input of less than 2 dimensions, of other than C
            channels or of no floating dtype on any rank; N = 1; an input that needs a gradient on
            some ranks only.
        TypeError: ``process_group`` is on another backend.
    """

    # DistributedDataParallel reads this, because its collectives in the backward pass must have one
    # order with those of this module.
    communicates_in_backward = True

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: AnyGroup = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        # torch's classes have the argument ``bias`` only since 2.12.
        if not bias:
            self.register_parameter("bias", None)
        if process_group is not None:
            # A group of another backend is refused in the constructor, not in the first step.
            native_group(process_group)
        self.process_group = process_group
        self._is_compared = False

    def forward(self, input: Tensor) -> Tensor:
        """Normalise.

        Args:
            input: Batch × C × any further dimensions, of a floating dtype.

        Returns:
            A tensor of the same shape, dtype and memory format.
        """
        group = native_group(self.process_group) if self.training else None
        refusal = self._refusal(input)
        if group is None or group.size == 1:
            if refusal is not None:
                raise ValueError(f"SyncBatchNorm: {refusal}")
            return super().forward(input)
        return self._synchronised(input, group, refusal)

    @untraced
    def _synchronised(self, input: Tensor, group: Group, refusal: str | None) -> Tensor:
        own = None if refusal is not None else batch_kernels.dense(input)
        needs_gradient = torch.is_grad_enabled() and input.requires_grad
        if not self._is_compared:
            self._require_same_layer(group)
        statistics = gather_statistics(group, own, self.num_features, needs_gradient, refusal)
        assert own is not None
        self._track(statistics)
        return Normalize.apply(own, self.weight, self.bias, statistics, self.eps, group)

    def _check_input_dim(self, input: Tensor) -> None:
        """Do nothing, because ``forward`` checks the input."""

    @untraced
    def _require_same_layer(self, group: Group) -> None:
        """Compare num_features between ranks, once per layer.

        Rows of other lengths would otherwise be read as statistics.

        Collective: over the group.
        """
        values = values_that_differ(group, self.num_features)
        if values is not None:
            raise ValueError(
                "SyncBatchNorm: num_features differ between ranks, or the layers are called in "
                f"another order. {values}"
            )
        self._is_compared = True

    def _refusal(self, input: Tensor) -> str | None:
        if input.dim() < 2:
            return f"expected an input of at least 2 dimensions; got shape {tuple(input.shape)}"
        if input.shape[1] != self.num_features:
            return f"expected {self.num_features} channels; got shape {tuple(input.shape)}"
        if not input.is_floating_point():
            return f"expected an input of a floating dtype; got {input.dtype}"
        return None

    @torch.no_grad()
    def _track(self, statistics: Statistics) -> None:
        if (
            not self.track_running_stats
            or self.running_mean is None
            or self.running_var is None
            or not statistics.count
        ):
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = 1.0 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        for running, new in (
            (self.running_mean, statistics.mean),
            (self.running_var, statistics.unbiased),
        ):
            running.mul_(1 - factor).add_(new.to(running), alpha=factor)

    def __deepcopy__(self, memo: dict[int, object]) -> SyncBatchNorm:
        """Copy everything except the group, which the copy shares."""
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __getstate__(self) -> dict[str, object]:
        """Return the state without the group, which cannot be stored in a file."""
        if self.process_group is not None:
            warnings.warn(
                "a SyncBatchNorm is saved without its process group, and loaded on the default one",
                stacklevel=2,
            )
        return {**self.__dict__, "process_group": None}

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_group: AnyGroup = None
    ) -> torch.nn.Module:
        """Replace every ``BatchNorm1d`` to ``3d``, and torch's ``SyncBatchNorm``, within a module.

        Parameters and buffers stay the same objects.

        Args:
            module: Changed in place, unless it is itself one of these layers.
            process_group: Group of all new layers; None for the default.

        Returns:
            The module, or the new layer if the module is itself one of these layers.
        """
        if process_group is not None:
            native_group(process_group)
        # A layer that is used several times is replaced by one new layer.
        layers = {
            id(part): cls._from(part, process_group)
            for part in module.modules()
            if _is_batch_norm(part)
        }
        for part in list(module.modules()):
            for name, child in part._modules.items():
                if id(child) in layers:
                    part._modules[name] = layers[id(child)]
        return layers.get(id(module), module)

    @classmethod
    def _from(cls, layer: _BatchNorm, process_group: AnyGroup) -> SyncBatchNorm:
        converted = cls(
            layer.num_features,
            layer.eps,
            layer.momentum,
            layer.affine,
            layer.track_running_stats,
            process_group,
        )
        # The same tensor objects, because optimizers and other modules may refer to them.
        converted._parameters.update(layer._parameters)
        converted._buffers.update(layer._buffers)
        converted.training = layer.training
        for hooks in _HOOKS:
            getattr(converted, hooks).update(getattr(layer, hooks))
        if hasattr(layer, "qconfig"):
            converted.qconfig = layer.qconfig
        return converted


def _is_batch_norm(module: torch.nn.Module) -> TypeGuard[_BatchNorm]:
    """Return whether ``SyncBatchNorm`` replaces a layer: torch's batch norms, no instance norms."""
    is_of_torch = isinstance(module, (_BatchNorm, torch.nn.SyncBatchNorm)) and not isinstance(
        module, SyncBatchNorm
    )
    return is_of_torch and not isinstance(module, torch.nn.modules.batchnorm._LazyNormBase)
