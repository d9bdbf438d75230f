"""Time steps of a sharded optimizer: shards gathered in step(), or during the next forward pass.

mpirun -n 2 python benchmarks/bench_oss_overlap.py    (--layers, --width, --bucket-cap-mb)

Each round runs a few steps of each way, in turns; the parameters must be bitwise equal at the end.
Within a node nothing is gained: benchmarks/slow_link.sh RATE runs two nodes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import benchmark_options
import environment
import report
import torch
from tabulate import tabulate

from mpidist import comm
from mpidist.ddp.module import DistributedDataParallel
from mpidist.optim import OSS

# Consecutive steps of one way, with the communication that the last step leaves pending.
_STEPS = 4
_WAYS = {"in step()": False, "in the next forward pass": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--bucket-cap-mb", type=float, default=4.0)
    parser.add_argument(
        "--link", default=os.environ.get("MPIDIST_LINK", "node"), help="named in the record"
    )
    benchmark_options.add_output(parser)
    options = parser.parse_args()
    group = comm.init()
    trainers = {way: trainer(group, overlaps, options) for way, overlaps in _WAYS.items()}
    times: dict[str, list[float]] = {way: [] for way in trainers}
    for number in range(options.rounds + 1):
        for way, (ddp, optimizer) in trainers.items():
            group.barrier()
            start = time.perf_counter()
            for _ in range(_STEPS):
                step(ddp, optimizer, group.rank, options)
            optimizer.wait()
            if number >= 1:
                times[way].append(1e3 * (time.perf_counter() - start) / _STEPS)
    require_equal([ddp for ddp, _ in trainers.values()])
    from mpi4py import MPI

    described = environment.describe(MPI.COMM_WORLD)
    if group.rank:
        return
    rows: list[dict[str, Any]] = [
        {
            "shards are brought": way,
            "step, ms (median)": statistics.median(each),
            "shortest": min(each),
        }
        for way, each in times.items()
    ]
    print(tabulate([list(row.values()) for row in rows], list(rows[0]), floatfmt=".1f"))
    record = {
        "benchmark": "oss-overlap",
        "environment": described,
        "link": options.link,
        "parameters_bytes": 4 * options.layers * options.width * (options.width + 1),
        "batch": options.batch,
        "bucket_cap_mb": options.bucket_cap_mb,
        "results": rows,
    }
    report.write_json(record, options.output / f"oss-overlap-{group.size}-{options.link}.json")


def trainer(
    group: Any, overlaps: bool, options: argparse.Namespace
) -> tuple[DistributedDataParallel, OSS]:
    """Build a model of equal layers and its optimizer.

    Collective: over the group.
    """
    torch.manual_seed(0)
    layers = [
        torch.nn.Sequential(torch.nn.Linear(options.width, options.width), torch.nn.Tanh())
        for _ in range(options.layers)
    ]
    ddp = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group)
    return ddp, OSS(
        ddp.parameters(),
        torch.optim.SGD,
        group,
        overlap=overlaps,
        bucket_cap_mb=options.bucket_cap_mb,
        lr=0.01,
    )


def step(
    ddp: DistributedDataParallel, optimizer: OSS, rank: int, options: argparse.Namespace
) -> None:
    """Run one training step; the forward pass waits for what the last step left pending."""
    torch.manual_seed(rank)
    ddp(torch.randn(options.batch, options.width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def require_equal(modules: list[DistributedDataParallel]) -> None:
    """Compare all models with the first.

    Raises:
        RuntimeError: A parameter differs.
    """
    for module in modules[1:]:
        for (name, one), other in zip(
            module.named_parameters(), modules[0].parameters(), strict=True
        ):
            if not torch.equal(one, other):
                raise RuntimeError(f"parameter {name} differs with overlap=True")


if __name__ == "__main__":
    main()
