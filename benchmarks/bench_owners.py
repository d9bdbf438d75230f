"""Time gradients reduced to their owners against averages on all ranks, with memory per rank.

mpirun --bind-to none -n 2 python benchmarks/bench_owners.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from harness import timing
from mpidist.ddp import to_owners
from training import cases
from training import run as training_run

Bounds = dict[torch.Tensor, tuple[tuple[int, int, int], ...]]

# Relative to the largest gradient. Devices and networks add in different orders.
_WRONG = 1e-4


def main() -> None:
    options = training_run.arguments(
        __doc__.splitlines()[0], ["mlp:64", "resnet18:8"], rounds=25, bucket_cap_mb=4.0
    )
    training_run.run("owners", measure, options, counted="gradient_bytes")


def measure(raw: Any, model: cases.Model, options: argparse.Namespace) -> training_run.Measured:
    """Check and time the ways on one model with equal buckets; return the bytes of each, too.

    Collective: over all ranks.

    Raises:
        RuntimeError: A rank's share differs from the average, or the rank holds more than its
            share; on this rank.
    """
    batch = cases.own_batch(model)
    ways: dict[str, Callable[[], torch.nn.Module]] = {
        "bare": lambda: cases.build(model),
        "mpidist": lambda: cases.ours(model, bucket_cap_mb=options.bucket_cap_mb),
        "to_owners": lambda: _owned(model, options, buffers=2),
        "to_owners, 1 buffer": lambda: _owned(model, options, buffers=1),
    }
    nets = {name: build() for name, build in ways.items()}
    contenders = [cases.contender(name, net, batch) for name, net in nets.items()]
    for name in ("to_owners", "to_owners, 1 buffer"):
        _require_share(f"{model.name}, {name}", nets[name], nets["mpidist"])
    held = {one.name: _most_held(nets[one.name], one) for one in contenders}
    most = {name: float(max(raw.allgather(own))) for name, own in held.items()}
    return timing.time_rounds(raw, contenders, options.rounds, 0.02), most


def bounds_of(net: torch.nn.Module) -> Bounds:
    """Assign whole parameters to ranks: the largest first, to the rank with the fewest elements."""
    numel_of_rank = [0] * dist.get_world_size()
    bounds: Bounds = {}
    for parameter in sorted(net.parameters(), key=torch.Tensor.numel, reverse=True):
        rank = numel_of_rank.index(min(numel_of_rank))
        numel_of_rank[rank] += parameter.numel()
        bounds[parameter] = ((rank, 0, parameter.numel()),)
    return bounds


def _owned(model: cases.Model, options: argparse.Namespace, buffers: int) -> torch.nn.Module:
    net = cases.ours(model, bucket_cap_mb=options.bucket_cap_mb)
    net.register_comm_hook(None, to_owners(bounds_of(net), buffers=buffers))
    return net


def _require_share(name: str, net: torch.nn.Module, plain: torch.nn.Module) -> None:
    rank, bounds = dist.get_rank(), bounds_of(net)
    largest = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
    for own, other in zip(net.parameters(), plain.parameters(), strict=True):
        is_owned = bounds[own][0][0] == rank
        if is_owned != (own.grad is not None):
            raise RuntimeError(
                f"{name}: rank {rank} has {'no' if is_owned else 'a'} gradient of shape "
                f"{tuple(own.shape)}"
            )
        if (
            own.grad is not None
            and other.grad is not None
            and float((own.grad - other.grad).abs().max()) > _WRONG * largest
        ):
            raise RuntimeError(
                f"{name}: the gradient of shape {tuple(own.shape)} differs from the average"
            )


def _most_held(net: torch.nn.Module, contender: timing.Contender) -> int:
    """Return the peak bytes of gradients and buckets during a step, on this rank."""
    most = 0

    def look(parameter: torch.Tensor) -> None:
        nonlocal most
        most = max(most, _held(net))

    handles = [parameter.register_post_accumulate_grad_hook(look) for parameter in net.parameters()]
    for call in contender.calls:
        call()
    for handle in handles:
        handle.remove()
    return max(most, _held(net))


def _held(net: torch.nn.Module) -> int:
    reducer = getattr(net, "reducer", None)
    spans = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    if reducer is not None:
        views: Mapping[int, torch.Tensor] = reducer.layout.views
        spans += [*views.values(), *(bucket.flat for bucket in reducer.layout.buckets)]
    # Gradients and views lie in buckets, and buckets share memory: count the union of all spans.
    total = end = 0
    for start, stop in sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


if __name__ == "__main__":
    main()
