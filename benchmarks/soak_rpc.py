"""Soak test of mpidist.rpc: many calls and references, with constant memory, tables and threads.

mpirun -n 2 python benchmarks/soak_rpc.py --calls 1000000 --references 100000
"""

from __future__ import annotations

import argparse
import gc
import random
import threading
import time
from typing import Any

import psutil
import torch

import mpidist.comm
import mpidist.rpc as rpc
from mpidist.rpc import api

# Memory is measured after each part.
_PARTS = 10
# Allowed growth in the second half, relative to the first half.
_GROWTH = 0.05
# Allowed growth that the allocator may cause.
_SLACK_BYTES = 16 << 20


def echo(value: Any) -> Any:
    """Return the argument."""
    return value


def use_and_drop(reference: Any) -> float:
    """Use a reference on a worker that is not its owner, and drop the reference."""
    return float(reference.to_here().sum())


def main() -> None:
    options = _arguments()
    torch.set_num_threads(1)
    group = mpidist.comm.init()
    rpc.init_rpc(f"worker{group.rank}", group=group)
    rng = random.Random(group.rank)
    memory = [
        _soak(options.calls // _PARTS, options.references // _PARTS, group, rng)
        for _ in range(_PARTS)
    ]
    agent = api._get_current_rpc_agent()
    rpc.shutdown()
    problem = _problem(memory, agent)
    reports = group.all_gather_object((memory, problem))
    if group.rank == 0:
        print(
            f"{options.calls} calls, {options.references} references on each of {group.size} "
            "workers"
        )
        for rank, (values, _) in enumerate(reports):
            print(
                f"rank {rank}: resident MiB " + " ".join(f"{value / 2**20:.0f}" for value in values)
            )
        print("; ".join(text for _, text in reports if text) or "nothing left, memory flat")
    if any(text for _, text in reports):
        raise SystemExit(1)


def _soak(calls: int, references: int, group: Any, rng: random.Random) -> int:
    """Make calls of all kinds and sizes; return this process's resident memory in bytes."""
    others = [rank for rank in range(group.size) if rank != group.rank] or [0]
    tensors = [torch.ones(size) for size in (1, 100, 5000, 50_000)]
    pending = []
    for number in range(calls):
        to, way = rng.choice(others), number % 20
        if way == 0:
            tensor = rng.choice(tensors)
            if rpc.rpc_sync(to, echo, args=(tensor,)).shape != tensor.shape:
                raise RuntimeError("an echo has another shape")
        elif way < 4:
            if rpc.rpc_sync(to, echo, args=(number,)) != number:
                raise RuntimeError("an echo has another value")
        else:
            pending.append(rpc.rpc_async(to, echo, args=(number,)))
            if len(pending) == 200:
                _ = [future.wait() for future in pending]
                pending.clear()
    _ = [future.wait() for future in pending]
    for _ in range(references):
        reference = rpc.remote(rng.choice(others), torch.ones, args=(10,))
        if rpc.rpc_sync(rng.choice(others), use_and_drop, args=(reference,)) != 10.0:
            raise RuntimeError("a reference has another value")
    gc.collect()
    group.barrier()
    return int(psutil.Process().memory_info().rss)


def _problem(memory: list[int], agent: Any) -> str:
    """Return a description of leaks or growth; empty without any."""
    half = max(memory[1 : _PARTS // 2])
    if memory[-1] > half * (1 + _GROWTH) + _SLACK_BYTES:
        return f"resident memory grew from {half >> 20} to {memory[-1] >> 20} MiB"
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(
        thread.name.startswith("mpidist-rpc") for thread in threading.enumerate()
    ):
        time.sleep(0.01)
    threads = [
        thread.name for thread in threading.enumerate() if thread.name.startswith("mpidist-rpc")
    ]
    entries, forks = agent.references.store.counts()
    left = {
        "calls": len(agent.calls),
        "references": entries,
        "forks": forks,
        "creations": agent.calls.creations(),
        "threads": threads,
    }
    return "" if not any(left.values()) else f"left: {left}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1_000_000, help="of each worker")
    parser.add_argument("--references", type=int, default=100_000, help="of each worker")
    return parser.parse_args()


if __name__ == "__main__":
    main()
