"""Fuzzing of two threads that use one group, its works and one future, and close the group.

mpirun -n 2 python -m tests.thread_fuzz --count 1000 --seed 0

The first failure is printed with the seed that repeats it; the exit status is then 1 on all ranks.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time

from mpidist.comm import init
from tests.fuzz.deadline import Deadline
from tests.thread_fuzz import rounds


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.thread_fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="how many rounds")
    parser.add_argument("--seed", type=int, default=0, help="the first one's seed")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one of them")
    options = parser.parse_args()
    faulthandler.enable()
    world = init()
    deadline = Deadline(options.limit, world.rank)
    start = time.monotonic()
    for seed in range(options.seed, options.seed + options.count):
        deadline.start(f"python -m tests.thread_fuzz --seed {seed} --count 1")
        failures = rounds.run(seed, world, deadline)
        deadline.stop()
        if failures:
            sys.stderr.write(f"seed {seed}: {'; '.join(failures)}\n")
            return 1
    if world.rank == 0:
        sys.stdout.write(f"{options.count} rounds, {time.monotonic() - start:.0f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
