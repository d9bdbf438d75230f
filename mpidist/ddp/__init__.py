"""plan → bucket → reducer → hooks → comm: gradients to their average. The names are torch's; importing it starts nothing."""

import torch as _torch

from mpidist.ddp.bucket import GradBucket
from mpidist.ddp.hooks.default import (
    Compressed,
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    noop_hook,
)
from mpidist.ddp.hooks.owners import to_owners
from mpidist.ddp.hooks.powersgd import batched_powerSGD_hook, powerSGD_hook
from mpidist.ddp.hooks.powersgd_state import PowerSGDState
from mpidist.ddp.module import DistributedDataParallel
from mpidist.ddp.plan import compute_bucket_assignment_by_size

__all__ = [
    "DistributedDataParallel",
    "GradBucket",
    "PowerSGDState",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "compute_bucket_assignment_by_size",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "powerSGD_hook",
    "to_owners",
]

# So that torch.load(weights_only=True) reads a saved hook and its state.
_torch.serialization.add_safe_globals(
    [
        Compressed,
        PowerSGDState,
        allreduce_hook,
        batched_powerSGD_hook,
        bf16_compress_hook,
        fp16_compress_hook,
        noop_hook,
        powerSGD_hook,
    ]
)
