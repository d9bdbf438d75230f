"""Time all-gathers and FSDP2's unsharding on node memory against plain memory and Gloo.

mpirun --bind-to none -n 2 python benchmarks/bench_allocate.py

These are the figures of docs/decisions/0021. A size is that of the gathered tensor. "all-gather"
is the call alone, in place, on tensors that are kept. "unshard" is FSDP2's own: it allocates its
staging tensor, copies the shard in, gathers, copies the parameter out and frees it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from collectives.case import FP32_BYTES
from harness import benchmark_options, report, timing
from harness.job import Job
from harness.timing import Contender

_SIDES = (256, 512, 1024, 2048, 4096)  # of a square weight: 256 KiB to 64 MiB
_QUICK_SIDES = (256,)


def all_gathers(gloo: Any, side: int) -> list[Contender]:
    """Gather in place.

    Collective: over all ranks.
    """
    native, numel = dist.group.WORLD.native, side * side
    memories = {
        "gloo": (gloo, torch.empty(numel)),
        "mpidist": (dist.group.WORLD, torch.empty(numel)),
        "node memory": (dist.group.WORLD, native.allocate(numel, torch.float32)),
    }
    rank, size = dist.get_rank(), dist.get_world_size()
    # Its name since torch 2.13.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    contenders = []
    for name, (group, output) in memories.items():
        output.fill_(-1)
        shard = output.view(size, -1)[rank].fill_(rank + 1)

        def call(output: torch.Tensor = output, shard: Any = shard, group: Any = group) -> None:
            gather(output, shard, group=group)

        contenders.append(Contender(name, (call,), (output,)))
    return contenders


def unshards(gloo: Any, side: int) -> list[Contender]:
    """Unshard and reshard a layer of FSDP2.

    Collective: over all ranks.
    """
    contenders = []
    for name in ("gloo", "mpidist", "node memory"):
        group = gloo if name == "gloo" else dist.group.WORLD
        layer: Any = torch.nn.Linear(side, side, bias=False)
        with torch.no_grad():
            layer.weight.view(dist.get_world_size(), -1).copy_(
                torch.arange(1.0, dist.get_world_size() + 1)[:, None]
            )
        layer = fully_shard(layer, mesh=DeviceMesh.from_group(group, "cpu"))
        if name == "node memory":
            layer.set_allocate_memory_from_process_group_for_comm(True)
        layer.unshard()
        whole = layer.weight.detach()

        def call(layer: Any = layer) -> None:
            layer.reshard()
            layer.unshard()

        contenders.append(Contender(name, (call,), (whole,)))
    return contenders


def check(case: str, contenders: list[Contender]) -> None:
    """Require the shards of all ranks, after two calls.

    Raises:
        RuntimeError: A result is wrong, on this rank.
    """
    wanted = torch.arange(1.0, dist.get_world_size() + 1)[:, None]
    for contender in contenders:
        for _ in range(2):
            contender.calls[0]()
        (output,) = contender.outputs
        if not bool((output.view(dist.get_world_size(), -1) == wanted).all()):
            raise RuntimeError(f"{case}, {contender.name}: wrong result")


def cases(gloo: Any, sides: tuple[int, ...]) -> Iterator[tuple[str, int, list[Contender]]]:
    for side in sides:
        yield "all-gather", side * side, all_gathers(gloo, side)
    for side in sides:
        yield "unshard", side * side, unshards(gloo, side)


def main() -> None:
    options = benchmark_options.parser(__doc__, "quick", rounds=15).parse_args()
    rounds, burst_s = (3, 0.002) if options.quick else (options.rounds, 0.02)
    with Job(uses_torch=True) as job:
        gloo = dist.new_group(backend="gloo")
        timing.touch_memory()
        results = []
        for name, numel, contenders in cases(gloo, _QUICK_SIDES if options.quick else _SIDES):
            check(name, contenders)
            series = timing.time_rounds(job.raw, contenders, rounds, burst_s)
            results.append(report.result_of(name, numel, numel * FP32_BYTES, series))
        if job.is_first:
            job.show()
            report.print_by_operation(results)
            job.write(options.output, "allocate", {"rounds": rounds, "results": results})


if __name__ == "__main__":
    main()
