"""plan → bucket → reducer → hooks → comm: gradients to their average.

The names are torch's; importing the package starts neither MPI nor CUDA.
"""

from mpidist.ddp.buckets.plan import compute_bucket_assignment_by_size
from mpidist.ddp.diloco import DiLoCo
from mpidist.ddp.hooks.adaptive import adaptive_hook
from mpidist.ddp.hooks.adaptive_state import AdaptiveState
from mpidist.ddp.hooks.default import (
    Compressed,
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    noop_hook,
)
from mpidist.ddp.hooks.grad_bucket import GradBucket
from mpidist.ddp.hooks.owners import to_owners
from mpidist.ddp.hooks.powersgd import batched_powerSGD_hook, powerSGD_hook
from mpidist.ddp.hooks.powersgd_state import PowerSGDState
from mpidist.ddp.hooks.quantization import quantization_perchannel_hook, quantization_pertensor_hook
from mpidist.ddp.hooks.registry import DDPCommHookType, register_ddp_comm_hook
from mpidist.ddp.module import DistributedDataParallel

__all__ = [
    "AdaptiveState",
    "DDPCommHookType",
    "DiLoCo",
    "DistributedDataParallel",
    "GradBucket",
    "PowerSGDState",
    "adaptive_hook",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "compute_bucket_assignment_by_size",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "powerSGD_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
    "register_ddp_comm_hook",
    "to_owners",
]

# Globals for torch.serialization.add_safe_globals, with which torch.load(weights_only=True) reads a
# saved hook and its state. They are not registered here, because a file from elsewhere could then
# have these functions called.
SAFE_GLOBALS = [
    Compressed,
    PowerSGDState,
    adaptive_hook,
    allreduce_hook,
    batched_powerSGD_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    noop_hook,
    powerSGD_hook,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
]
