"""Print where the time of a step of distributed autograd goes: both workers' stages, in us.

mpirun --bind-to none -n 2 python benchmarks/bench_autograd_stages.py
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import Counter
from typing import Any

import numpy as np

import mpidist.rpc
from harness import benchmark_options, tables
from harness.job import Job
from rpc import autograd_stages as stages
from rpc import workers as rpc_workers
from rpc.autograd_cases import Chain
from rpc.autograd_stacks import stack_of
from rpc.autograd_stages import Key

_WARM_UP = 30  # steps
_MOST_STEPS = 400  # of one block, whose entries the recorder keeps


def main() -> None:
    """Time steps without and with stamps, in turn, and write the record. Collective."""
    options = _arguments()
    steps, blocks = (5, 1) if options.quick else (options.steps, options.blocks)
    if not 0 < steps <= _MOST_STEPS:
        raise SystemExit(f"--steps is 1 to {_MOST_STEPS}; got {steps}")
    plain_us: list[float] = []
    stamped_us: list[float] = []
    times: list[dict[Key, float]] = []
    counts: Counter[Key] = Counter()
    with Job() as job:
        job.show()
        for block in range(2 * blocks):
            is_stamped = block % 2 == 1
            if is_stamped:
                stages.install()
            rpc_workers.start("mpidist", job.group)
            if is_stamped:
                stages.install_in_agent()
            if job.is_first:
                try:
                    if is_stamped:
                        found, counted = _stamped(options, steps)
                        times += found
                        counts += counted
                        stamped_us += [sum(step.values()) for step in found]
                    else:
                        plain_us += _steps_us(_chain(options), steps)
                finally:
                    for rank in range(1, job.group.size):
                        mpidist.rpc.rpc_sync(f"worker{rank}", rpc_workers.begin, args=("leave",))
            else:
                rpc_workers.follow_phases()
            rpc_workers.end("mpidist", job.group)
            stages.remove()
        if job.is_first:
            fields = _fields(times, counts, plain_us, stamped_us)
            _print(fields)
            job.write(options.output, "stages", {"steps": steps * blocks, **fields})


def _chain(options: argparse.Namespace) -> Chain:
    """Return the model, checked and warm."""
    chain = Chain(stack_of(options.mode), options.layers, not options.without_step)
    chain.check()
    _steps_us(chain, _WARM_UP)
    return chain


def _steps_us(chain: Chain, steps: int) -> list[float]:
    """Return the time of each step."""
    found = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(steps):
            start = time.perf_counter()
            chain()
            found.append(1e6 * (time.perf_counter() - start))
    finally:
        gc.enable()
    return found


def _stamped(
    options: argparse.Namespace, steps: int
) -> tuple[list[dict[Key, float]], Counter[Key]]:
    """Return each step's stages, and the number of their calls."""
    chain = _chain(options)
    mpidist.rpc.rpc_sync("worker1", stages.begin)
    stages.begin()
    _steps_us(chain, steps)
    own = stages.collected()
    other = mpidist.rpc.rpc_sync("worker1", stages.collected)
    return stages.steps_of(stages.spans_of(own), stages.spans_of(other), stages.cost_ns())


def _fields(
    times: list[dict[Key, float]],
    counts: Counter[Key],
    plain_us: list[float],
    stamped_us: list[float],
) -> dict[str, Any]:
    """Return the fields of the record: medians over the steps."""
    keys = sorted(
        {key for step in times for key in step},
        key=lambda key: (stages.PHASES.index(key[0]), key[1], stages.NAMES.index(key[2])),
    )
    rows = [
        {
            "phase": phase,
            "worker": worker,
            "stage": stage,
            "calls": counts[phase, worker, stage] / len(times),
            "us": float(np.median([step.get((phase, worker, stage), 0.0) for step in times])),
        }
        for phase, worker, stage in keys
    ]
    return {
        "stages": rows,
        "sum_us": sum(row["us"] for row in rows if row["stage"] != stages.STAMPS),
        "stamps_us": sum(row["us"] for row in rows if row["stage"] == stages.STAMPS),
        "mpi_us": sum(row["us"] for row in rows if row["stage"] in stages.OF_MPI),
        "step_us": float(np.median(plain_us)),
        "stamped_step_us": float(np.median(stamped_us)),
    }


def _print(fields: dict[str, Any]) -> None:
    step_us = fields["step_us"]
    rows = [
        [*row.values(), 100 * row["us"] / step_us] for row in fields["stages"] if row["us"] >= 0.05
    ]
    headers = ("phase", "worker", "stage", "calls\na step", "us\na step", "% of\na step")
    print(f"\n{tables.text(rows, headers, '.1f', keys=3)}\n")
    for text, us in (
        ("a step without stamps", step_us),
        ("a step with stamps", fields["stamped_step_us"]),
        ("all stages together, without the stamps themselves", fields["sum_us"]),
        ("the stamps themselves", fields["stamps_us"]),
        ("of MPI: sends, and messages under way", fields["mpi_us"]),
    ):
        print(f"{us:7.0f} us {100 * us / step_us:4.0f} %  {text}")


def _arguments() -> argparse.Namespace:
    parser = benchmark_options.parser(__doc__, "quick")
    parser.add_argument("--layers", type=int, default=4, help="of the model, all on worker 1")
    parser.add_argument("--without-step", action="store_true", help="no optimizer's step")
    parser.add_argument(
        "--mode", choices=("mpidist", "smart"), default="mpidist", help="mpidist is FAST mode"
    )
    parser.add_argument("--steps", type=int, default=200, help="in a block, at most 400")
    parser.add_argument(
        "--blocks", type=int, default=5, help="without stamps, and with them, in turn"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
