"""Time MPI's all-reduce against the hierarchical one, between nodes with several ranks each.

RANKS=2 benchmarks/slow_link.sh 1gbit .mpich/bin/mpirun python benchmarks/bench_levels.py
"""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path
from statistics import median

import torch

import mpidist.comm
from harness.environment import describe
from mpidist.comm.algorithms import hierarchical, reduce_op, reductions, tuning_runs

SIZES = [4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    world = mpidist.comm.init()
    from mpi4py import MPI

    comm = world._comm
    if not comm.shares_nodes:
        raise SystemExit(
            f"needs several nodes with several ranks each; ranks are on nodes {list(comm.nodes)}"
        )
    reduction = reduce_op.reduction(torch.float32, reduce_op.SUM)
    rows = []
    for nbytes in options.sizes:
        flat = torch.empty(nbytes // 4)
        calls = {
            "library": partial(reductions.by_library, comm, flat, reduction),
            "levels": partial(hierarchical.all_reduce, comm, flat, reduction),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(options.rounds + 1):
            for name, call in calls.items():
                flat.fill_(world.rank + 1.0)
                elapsed_s = tuning_runs.once(comm, call)
                expected = world.size * (world.size + 1) / 2
                if not bool((flat == expected).all()):
                    raise SystemExit(f"{name} of {nbytes} bytes is wrong: {flat[:3]}")
                if turn:
                    times[name].append(elapsed_s)
        row = {
            "bytes": nbytes,
            **{f"{name}_us": 1e6 * median(elapsed_s) for name, elapsed_s in times.items()},
        }
        row["ratio_of_medians"] = row["library_us"] / row["levels_us"]
        rows.append(row)
        if world.rank == 0:
            library, levels, ratio = row["library_us"], row["levels_us"], row["ratio_of_medians"]
            print(
                f"{nbytes:>10} B  library {library:>9.0f} us  levels {levels:>9.0f} us  ratio "
                f"{ratio:.2f}",
                flush=True,
            )
    record = {
        "environment": describe(MPI.COMM_WORLD),
        "nodes": list(comm.nodes),
        "link": os.environ.get("MPIDIST_LINK"),
        "rows": rows,
    }
    if world.rank == 0 and options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
