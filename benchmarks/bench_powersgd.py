"""Time communication hooks, and count the bytes that each hook sends.

mpirun --bind-to none -n 2 python benchmarks/bench_powersgd.py
benchmarks/slow_link.sh 100mbit MPIRUN python benchmarks/bench_powersgd.py    (MPICH's mpirun)
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as torch_quantization

from harness import timing
from mpidist import ddp
from training import cases
from training import run as training_run

_BYTES = ("quantization_pertensor_hook", "quantization_perchannel_hook")
# The hook per channel needs NCCL.
_TORCH_BYTES = "torch's quantization_pertensor_hook"
# Relative to the largest gradient.
_WRONG = {"fp16_compress_hook": 2e-3, "bf16_compress_hook": 2e-2, "torch on mpidist": 1e-4}
_WRONG |= dict.fromkeys((*_BYTES, _TORCH_BYTES), 1e-2)


def main() -> None:
    models = ["mlp:64", "resnet18:8", "transformer:8"]
    training_run.run(
        "powersgd",
        measure,
        training_run.arguments(__doc__.splitlines()[0], models, rounds=15, bucket_cap_mb=4.0),
    )


def measure(raw: Any, model: cases.Model, options: argparse.Namespace) -> training_run.Measured:
    """Check and time the hooks on one model with equal buckets; return the bytes of each, too.

    Collective: over all ranks.

    Raises:
        RuntimeError: A hook's gradients are wrong, or its error feedback loses something; on this
            rank.
    """
    cap = options.bucket_cap_mb
    batch = cases.own_batch(model)
    states: dict[str, Any] = {}
    whole = 4.0 * model.numel()

    def powersgd(name: str, rank: int) -> torch.nn.Module:
        states[name] = ddp.PowerSGDState(None, rank, start_powerSGD_iter=0)
        return cases.ours(model, states[name], ddp.powerSGD_hook, bucket_cap_mb=cap)

    def theirs(name: str, rank: int) -> torch.nn.Module:
        states[name] = torch_powersgd.PowerSGDState(None, rank, start_powerSGD_iter=2)
        return cases.theirs(
            model, None, states[name], torch_powersgd.powerSGD_hook, bucket_cap_mb=cap
        )

    ways: dict[str, Callable[[], torch.nn.Module]] = {
        "bare": lambda: cases.build(model),
        "allreduce_hook": lambda: cases.ours(model, None, ddp.allreduce_hook, bucket_cap_mb=cap),
        "torch on mpidist": lambda: cases.theirs(model, None, bucket_cap_mb=cap),
        "fp16_compress_hook": lambda: cases.ours(
            model, None, ddp.fp16_compress_hook, bucket_cap_mb=cap
        ),
        "bf16_compress_hook": lambda: cases.ours(
            model, None, ddp.bf16_compress_hook, bucket_cap_mb=cap
        ),
        **{
            f"PowerSGD rank {r}": functools.partial(powersgd, f"PowerSGD rank {r}", r)
            for r in (1, 2, 4)
        },
        **{
            name: lambda name=name: cases.ours(model, None, getattr(ddp, name), bucket_cap_mb=cap)
            for name in _BYTES
        },  # type: ignore[misc]
        _TORCH_BYTES: lambda: cases.theirs(
            model, None, None, torch_quantization.quantization_pertensor_hook, bucket_cap_mb=cap
        ),
        "torch's PowerSGD rank 4": lambda: theirs("torch's PowerSGD rank 4", 4),
    }
    contenders = [cases.contender(name, build(), batch) for name, build in ways.items()]
    by_name = {one.name: one for one in contenders}
    for name, tolerance in _WRONG.items():
        distance = cases.farthest(by_name[name], by_name["allreduce_hook"])
        if distance > tolerance:
            raise RuntimeError(
                f"{model.name}: the gradients of {name} differ from allreduce_hook's by "
                f"{distance:.1e}"
            )
    for name, state in states.items():
        if isinstance(state, ddp.PowerSGDState):
            _require_nothing_lost(model, name, state, by_name)
    series = timing.time_rounds(raw, contenders, options.rounds, 0.02)
    sent = {"bare": 0.0, "allreduce_hook": whole, "torch on mpidist": whole}
    sent |= {"fp16_compress_hook": whole / 2, "bf16_compress_hook": whole / 2}
    sent |= dict.fromkeys((*_BYTES, _TORCH_BYTES), whole / 4)
    sent |= {name: whole / state.compression_stats()[0] for name, state in states.items()}
    return series, sent


def _require_nothing_lost(
    model: cases.Model, name: str, state: ddp.PowerSGDState, by_name: dict[str, Any]
) -> None:
    """Require that the next step's sent part and error add up to the average plus the old error."""
    before = state.consolidated().error_dict
    by_name[name].calls[0]()
    after = state.consolidated().error_dict
    names = [parameter for parameter, _ in cases.build(model).named_parameters()]
    truth = dict(zip(names, by_name["allreduce_hook"].outputs, strict=True))
    sent = dict(zip(names, by_name[name].outputs, strict=True))
    if not after:
        raise RuntimeError(f"{model.name}: {name} compressed nothing")
    for parameter, error in after.items():
        lost = truth[parameter] + before[parameter] - sent[parameter] - error
        if lost.norm() > 1e-3 * truth[parameter].norm():
            raise RuntimeError(
                f"{model.name}: {name} loses {lost.norm() / truth[parameter].norm():.1e} of "
                f"{parameter}"
            )


if __name__ == "__main__":
    main()
