"""Registry of communication hooks: ``DDPCommHookType`` and ``register_ddp_comm_hook``.

Source: ``torch.distributed.algorithms.ddp_comm_hooks``, for names and values.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from mpidist.comm.group_types import AnyGroup
from mpidist.comm.world_group import native_group
from mpidist.ddp.hooks.default import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    noop_hook,
)
from mpidist.ddp.hooks.powersgd import batched_powerSGD_hook, powerSGD_hook
from mpidist.ddp.hooks.powersgd_state import PowerSGDState
from mpidist.ddp.hooks.quantization import quantization_perchannel_hook, quantization_pertensor_hook
from mpidist.ddp.hooks.stages import Hook


class TakesHook(Protocol):
    """A module whose buckets hooks reduce."""

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """See ``DistributedDataParallel``."""


class _Registration:
    """Registration of a hook on a model, with a process group as its state."""

    def __init__(self, hook: Hook, rank: int | None = None) -> None:
        self.hook = hook
        self.rank = rank

    def __call__(
        self, model: TakesHook, state: AnyGroup = None, start_powerSGD_iter: int = 1_000
    ) -> None:
        if self.rank is None:
            model.register_comm_hook(state, self.hook)
            return
        made = PowerSGDState(
            state, matrix_approximation_rank=self.rank, start_powerSGD_iter=start_powerSGD_iter
        )
        model.register_comm_hook(made, self.hook)


class DDPCommHookType(Enum):
    """Communication hooks by name.

    ``DDPCommHookType.FP16_COMPRESS.value(model=model, state=process_group)`` registers a hook.
    The state is a process group, or None for the default one; the PowerSGD hooks construct a
    ``PowerSGDState`` from it.
    """

    ALLREDUCE = _Registration(allreduce_hook)
    FP16_COMPRESS = _Registration(fp16_compress_hook)
    BF16_COMPRESS = _Registration(bf16_compress_hook)
    QUANTIZE_PER_TENSOR = _Registration(quantization_pertensor_hook)
    QUANTIZE_PER_CHANNEL = _Registration(quantization_perchannel_hook)
    POWER_SGD = _Registration(powerSGD_hook, rank=1)
    POWER_SGD_RANK2 = _Registration(powerSGD_hook, rank=2)
    BATCHED_POWER_SGD = _Registration(batched_powerSGD_hook, rank=1)
    BATCHED_POWER_SGD_RANK2 = _Registration(batched_powerSGD_hook, rank=2)
    NOOP = _Registration(noop_hook)


def register_ddp_comm_hook(
    comm_hook_type: object, model: TakesHook, state: AnyGroup = None
) -> None:
    """Register a hook by its type.

    Args:
        comm_hook_type: A ``DDPCommHookType`` of this module; torch's types hold torch's hooks.
        model: A ``DistributedDataParallel``.
        state: The process group; None for the default.

    Raises:
        TypeError: ``comm_hook_type`` is of another type, or ``state`` is no group of mpidist.
    """
    if not isinstance(comm_hook_type, DDPCommHookType):
        name = getattr(comm_hook_type, "name", "ALLREDUCE")
        raise TypeError(
            "comm_hook_type must be of mpidist's own registry, "
            f"mpidist.ddp.hooks.registry.DDPCommHookType.{name}; got "
            f"{type(comm_hook_type).__module__}.{comm_hook_type!r}"
        )
    if state is not None:
        native_group(state)
    comm_hook_type.value(model=model, state=state)
