"""Memory of a rank in data-parallel training: tensors that live from step to step. Pure.

Not estimated: torch, CUDA and MPI themselves, temporary tensors of the backward pass and of hooks
(bf16: 2 bytes an element of the buckets under way), and what an allocator keeps.

Letters: n × m a gradient as a matrix; r the rank of its approximation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mpidist.ddp.hooks import lowrank
from mpidist.zero.shards import buffer_plan
from mpidist.zero.shards.partition import PARTITIONS
from optimizer import state_bytes
from training.gradient_lists import Shape

# Values of an element's size that an optimizer keeps for it.
OPTIMIZERS = {"sgd": 0, "momentum": 1, "adam": 2}
WHOLE = "none"
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
# PowerSGD's hook does not compress tensors that shrink less.
_LEAST_RATE = 2


@dataclass(frozen=True)
class Training:
    """Settings of the training.

    Attributes:
        ranks: Ranks that share the optimizer's state.
        optimizer: One of ``OPTIMIZERS``.
        partition: How OSS divides the state, or ``WHOLE``: each rank has all of it.
        element_bytes: Of parameters, gradients and state.
        powersgd_rank: r of the PowerSGD hook; 0 without it.
        copies_gradients: DDP's ``gradient_as_bucket_view=False``.
        activation_bytes: Given by the user.
    """

    ranks: int
    optimizer: str = "adam"
    partition: str = WHOLE
    element_bytes: int = 4
    powersgd_rank: int = 0
    copies_gradients: bool = False
    activation_bytes: int = 0


def estimate(shapes: Sequence[Shape], training: Training) -> dict[str, int]:
    """Return the bytes of the fullest rank, by what they hold.

    Args:
        shapes: Of the parameters, all trained, in their order.
        training: The settings.

    Raises:
        ValueError: An unknown optimizer or partition.
    """
    if training.optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizers are {', '.join(OPTIMIZERS)}; got {training.optimizer!r}")
    if training.partition not in (WHOLE, *PARTITIONS):
        raise ValueError(
            f"partitions are {', '.join((WHOLE, *PARTITIONS))}; got {training.partition!r}"
        )
    sizes = [math.prod(shape) for shape in shapes]
    whole, is_sharded = sum(sizes), training.partition != WHOLE
    # OSS lays parameters out in one buffer, each from a multiple of 64 elements.
    held = sum(map(buffer_plan.padded, sizes)) if is_sharded else whole
    own = (
        state_bytes.most_elements(sizes, training.ranks, training.partition)
        if is_sharded
        else whole
    )
    elements = {
        "parameters": held,
        "buckets, which gradients are views of": whole,
        "gradients beside the buckets": whole * training.copies_gradients,
        f"state of {training.optimizer}": OPTIMIZERS[training.optimizer] * own,
        "PowerSGD: errors and Q": _powersgd_elements(shapes, training.powersgd_rank),
    }
    found = {name: training.element_bytes * number for name, number in elements.items() if number}
    if training.activation_bytes:
        found["activations, as given"] = training.activation_bytes
    return found


def _powersgd_elements(shapes: Sequence[Shape], rank: int) -> int:
    if not rank:
        return 0
    total = 0
    for shape in shapes:
        if lowrank.is_compressible(shape, rank, _LEAST_RATE):
            n, numel = shape[0], math.prod(shape)
            m = numel // n
            total += numel + m * lowrank.rank_of(n, m, rank)
    return total
