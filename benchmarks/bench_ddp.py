"""Time training steps: mpidist's DDP, torch's DDP on Gloo and on mpidist, and no communication.

"zeroed" clears gradients to zeros, the others to None; "copies" has gradient_as_bucket_view=False.

mpirun --bind-to none -n 2 python benchmarks/bench_ddp.py
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from harness import devices, timing
from mpidist.ddp import noop_hook
from training import cases
from training import run as training_run

# Relative to the largest gradient. Sums in different orders differ by less.
_WRONG = 1e-4


def main() -> None:
    models = ["mlp:64", "mlp:256", "many:256", "resnet18:8", "transformer:8"]
    training_run.run(
        "ddp",
        measure,
        training_run.arguments(__doc__.splitlines()[0], models, rounds=25, bucket_cap_mb=None),
    )


def measure(raw: Any, model: cases.Model, options: argparse.Namespace) -> training_run.Measured:
    """Check and time the ways to train one model, all with the same buckets.

    Collective: over all ranks.

    Raises:
        RuntimeError: A contender's gradients are wrong; on this rank.
    """
    gloo = _gloo()
    cap = options.bucket_cap_mb
    batch = cases.own_batch(model)
    ours = functools.partial(cases.ours, model, None, bucket_cap_mb=cap)
    copies = functools.partial(ours, gradient_as_bucket_view=False)
    ways: dict[str, Callable[[], torch.nn.Module]] = {
        "bare": lambda: cases.build(model),
        "bare, zeroed": lambda: cases.build(model),
        "noop_hook": lambda: ours(noop_hook),
        "noop_hook, zeroed": lambda: ours(noop_hook),
        "noop_hook, copies": lambda: copies(noop_hook),
        "mpidist": ours,
        "mpidist, zeroed": ours,
        "mpidist, copies": copies,
        "torch on mpidist": lambda: cases.theirs(model, None, bucket_cap_mb=cap),
        "torch on Gloo": lambda: cases.theirs(model, gloo, bucket_cap_mb=cap),
    }
    if gloo is None:
        del ways["torch on Gloo"]
    contenders = [
        cases.contender(name, build(), batch, not name.endswith("zeroed"))
        for name, build in ways.items()
    ]
    by_name = {one.name: one for one in contenders}
    for name in (
        "mpidist, zeroed",
        "mpidist, copies",
        "torch on mpidist",
        *(["torch on Gloo"] if gloo is not None else []),
    ):
        distance = cases.farthest(by_name[name], by_name["mpidist"])
        if distance > _WRONG:
            raise RuntimeError(
                f"{model.name}: the gradients of {name} differ from mpidist's by {distance:.1e}"
            )
    contenders.append(_communication_alone(by_name["mpidist"]))
    return timing.time_rounds(raw, contenders, options.rounds, 0.02), {}


@functools.cache
def _gloo() -> Any:
    return dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None


def _communication_alone(trained: timing.Contender) -> timing.Contender:
    """Return the all-reduce of all gradients in one call: the communication without any overlap."""
    flat = trained.outputs[0].new_zeros(sum(t.numel() for t in trained.outputs))

    def call() -> None:
        dist.all_reduce(flat)
        devices.synchronize(flat.device)

    return timing.Contender("communication alone", (call,), (flat,))


if __name__ == "__main__":
    main()
