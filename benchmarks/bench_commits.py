"""Commits in memory: what one costs the steps of a sharded optimizer.

mpirun --bind-to none -n 3 python benchmarks/bench_commits.py

Adam in an OSS over a perceptron of 8.4 M parameters under DistributedDataParallel, with one torch
thread per rank. Blocks of ten steps with a commit after the first of them, and without, in turns.
The exposed share is the increase of a block over the block's time without; the last commit is
loaded, and compared with the run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch

from harness import benchmark_options
from harness.job import Job
from mpidist.checkpoint import commit, load
from mpidist.ddp import DistributedDataParallel
from mpidist.optim import OSS
from optimizer.cases import mlp

STEPS = 10  # in a block
MOST_EXPOSED = 0.03


class Run:
    """Perceptron with its optimizer, on one rank."""

    def __init__(self, group: Any, width: int, batch: int, seed: int) -> None:
        net = mlp(8, width, seed=seed)
        self.module = DistributedDataParallel(net, process_group=group)
        self.optimizer = OSS(net.parameters(), torch.optim.Adam, group, lr=1e-3)
        self._inputs = torch.randn(batch, width)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.module(self._inputs).square().mean().backward()
        self.optimizer.step()


def main() -> None:
    parser = benchmark_options.parser(__doc__, "quick", rounds=9)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=128)
    options = parser.parse_args()
    if options.quick:
        options.width, options.batch, options.rounds = 64, 4, 2
    with Job(least=1) as job:
        group = job.group
        run = Run(group, options.width, options.batch, seed=group.rank)
        with tempfile.TemporaryDirectory() as own:
            folder = group.broadcast_object(own)
            times = blocks(group, run, folder, options.rounds)
            check(group, run, folder, options)
        without, beside = (statistics.median(times[name]) for name in ("without", "with"))
        fields = {
            "parameters": sum(parameter.numel() for parameter in run.module.parameters()),
            "batch": options.batch,
            "steps": STEPS,
            "block_ms": times,
            "step_ms": without / STEPS,
            "exposed_share": statistics.median(
                one / other - 1 for one, other in zip(times["with"], times["without"], strict=True)
            ),
            "exposed_share_of_medians": beside / without - 1,
        }
        if job.is_first:
            show(fields)
            job.write(options.output, "commits", fields)


def blocks(group: Any, run: Run, folder: str, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each block, and of the calls of ``commit``, on the slowest rank.

    The order within a round changes from round to round.
    """
    found: dict[str, list[float]] = {"without": [], "with": [], "commit": []}
    number = 0
    for turn in range(rounds + 1):
        for name in ("without", "with") if turn % 2 else ("with", "without"):
            group.barrier()
            start = time.perf_counter()
            for step in range(STEPS):
                run.step()
                if step == 0 and name == "with":
                    number += 1
                    before = time.perf_counter()
                    commit(folder, number, model=run.module, optimizer=run.optimizer)
                    found["commit"].append(slowest(group, before))
            found[name].append(slowest(group, start))
    return {name: values[1:] for name, values in found.items()}


def slowest(group: Any, start: float) -> float:
    """Return the milliseconds since a start, of the slowest rank."""
    passed = torch.tensor([1e3 * (time.perf_counter() - start)], dtype=torch.float64)
    group.all_reduce(passed, "max")
    return float(passed)


def check(group: Any, run: Run, folder: str, options: argparse.Namespace) -> None:
    """Load a commit into another run, and compare both.

    Raises:
        RuntimeError: They differ.
    """
    commit(folder, 10**6, model=run.module, optimizer=run.optimizer)
    other = Run(group, options.width, options.batch, seed=7)
    load(folder, model=other.module, optimizer=other.optimizer)
    pairs = zip(run.module.parameters(), other.module.parameters(), strict=True)
    if not all(torch.equal(one, two) for one, two in pairs):
        raise RuntimeError(f"the loaded parameters are wrong on rank {group.rank}")
    states = [one.optimizer.state_dict(all_ranks=True)["state"] for one in (run, other)]
    for number, held in states[0].items():
        if not all(torch.equal(value, states[1][number][name]) for name, value in held.items()):
            raise RuntimeError(f"the loaded state of parameter {number} is wrong")


def show(record: dict[str, Any]) -> None:
    times, share = record["block_ms"], record["exposed_share"]
    print(f"{record['parameters'] / 1e6:.1f} M parameters, a step {record['step_ms']:.1f} ms")
    for name, values in times.items():
        unit = "call of commit" if name == "commit" else f"{STEPS} steps {name}"
        print(f"{unit:>20}: median {statistics.median(values):.1f} ms, worst {max(values):.1f}")
    verdict = "met" if share <= MOST_EXPOSED else "missed"
    print(f"exposed: {share:.1%} of a step's time (goal {MOST_EXPOSED:.0%}: {verdict})")


if __name__ == "__main__":
    main()
