"""Time the life of a group in one job: made (or ``--shrink``), used for one all-reduce, closed.

Prints one JSON line on rank 0. ``PYTHONPATH`` chooses the tree; run it for two trees in turns:

PYTHONPATH=TREE mpirun -n 2 python benchmarks/collectives/group_lifetime_job.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

import mpidist
import mpidist.comm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument(
        "--shrink",
        action="store_true",
        help="make the group by ProcessGroup.shrink, without a death",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    world = mpidist.comm.init()
    tensor, times = torch.ones(2), []
    for number in range(options.groups + 20):
        world.barrier()
        start = time.perf_counter()
        if options.shrink:
            # The excluded rank, another each time, takes no part; its time is that of a barrier.
            gone = number % world.size
            group = None if world.rank == gone else world.shrink([gone], name=f"group{number}")
        else:
            group = world.new_group(range(world.size), f"group{number}")
        tensor.fill_(1)
        if group is not None:
            group.all_reduce(tensor)
            group.close()
        passed = torch.tensor([1e6 * (time.perf_counter() - start)], dtype=torch.float64)
        if group is not None and tensor.tolist() != [group.size] * 2:
            raise RuntimeError(f"the all-reduce of group {number} is wrong: {tensor.tolist()}")
        world.all_reduce(passed, "max")
        times.append(float(passed))
    if world.rank == 0:
        tree = Path(mpidist.__file__).parents[1].name
        print(json.dumps({"tree": tree, "median_us": statistics.median(times[20:])}), flush=True)


if __name__ == "__main__":
    main()
