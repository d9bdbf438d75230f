"""Time MPI's all-reduce against the hierarchical one, between nodes with several ranks each.

RANKS=2 benchmarks/slow_link.sh 1gbit .mpich/bin/mpirun python benchmarks/bench_levels.py
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

from harness import benchmark_options, timing
from harness.job import Job
from mpidist.comm.algorithms import hierarchical, reduce_op, reductions

SIZES = [4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]


def main() -> None:
    parser = benchmark_options.parser(__doc__, "link", rounds=9, burst_s=0.0)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    options = parser.parse_args()
    with Job() as job:
        nodes = job.group._comm.nodes
        if not job.group._comm.shares_nodes:
            raise SystemExit(
                f"needs several nodes with several ranks each; ranks are on nodes {list(nodes)}"
            )
        rows = [_row(job, nbytes, options) for nbytes in options.sizes]
        if job.is_first:
            fields = {"nodes": list(nodes), "link": options.link, "rows": rows}
            job.write(options.output, "levels", fields, parts=[options.link])


def _row(job: Job, nbytes: int, options: argparse.Namespace) -> dict[str, Any]:
    """Check and time both ways at one size; return medians in microseconds, print them."""
    comm, flat = job.group._comm, torch.empty(nbytes // 4)
    reduction = reduce_op.reduction(torch.float32, reduce_op.SUM)
    calls = {
        "library": partial(reductions.by_library, comm, flat, reduction),
        "levels": partial(hierarchical.all_reduce, comm, flat, reduction),
    }
    for name, call in calls.items():
        flat.fill_(job.rank + 1.0)
        call()
        if not bool((flat == job.group.size * (job.group.size + 1) / 2).all()):
            raise SystemExit(f"{name} of {nbytes} bytes is wrong: {flat[:3]}")
    flat.zero_()  # sums of zeros stay zeros
    contenders = [timing.Contender(name, (call,), (flat,)) for name, call in calls.items()]
    series = timing.time_rounds(job.raw, contenders, options.rounds, options.burst_s)
    row = {"bytes": nbytes, **{f"{one.name}_us": one.median_us for one in series}}
    row["ratio_of_medians"] = row["library_us"] / row["levels_us"]
    if job.is_first:
        library, levels, ratio = row["library_us"], row["levels_us"], row["ratio_of_medians"]
        print(
            f"{nbytes:>10} B  library {library:>9.0f} us  levels {levels:>9.0f} us  ratio "
            f"{ratio:.2f}",
            flush=True,
        )
    return row


if __name__ == "__main__":
    main()
