"""Cost per call of a context of distributed autograd, with an engine that records nothing.

mpirun --bind-to none -n 2 python benchmarks/bench_rpc_context.py
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import mpidist.comm
import mpidist.rpc as rpc
from harness import tables
from mpidist.rpc.threads import interceptor
from rpc.workers import echo, noop

BLOCKS, CALLS = 30, 200


class Engine:
    """Smallest engine that rpc accepts: numbers each message whose tensors need gradients."""

    def __init__(self) -> None:
        self.context = 0

    def current_context(self) -> int:
        return self.context

    def leaving(self, context: int, to: int, tensors: list[torch.Tensor], is_answer: bool) -> int:
        return int(any(tensor.requires_grad for tensor in tensors))

    def arriving(
        self, context: int, source: int, number: int, tensors: list[Any], is_answer: bool
    ) -> list[Any]:
        return tensors

    @contextlib.contextmanager
    def entering(self, context: int, source: int, is_answer: bool) -> Iterator[None]:
        yield

    def worker_left(self, rank: int) -> None:
        """Do nothing, because nothing is recorded."""


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    group = mpidist.comm.init()
    engine: Any = Engine()
    rpc.init_rpc(f"worker{group.rank}")
    if group.rank == 0:
        leaf = torch.ones(256, requires_grad=True)
        cases: dict[str, Callable[[], Any]] = {
            "no-op": lambda: rpc.rpc_sync("worker1", noop),
            "echo of 1 KiB that needs a gradient": lambda: rpc.rpc_sync(
                "worker1", echo, args=(leaf,)
            ),
        }
        rows = [(name, *_medians_us(engine, case)) for name, case in cases.items()]
        rows = [(*row, row[2] - row[1], (row[3] - row[1]) / 2) for row in rows]
        headers = (
            "us, median",
            "no engine",
            "engine, no context",
            "context",
            "engine adds",
            "context adds, a message",
        )
        print(tables.text(rows, headers, floats=".1f"))
    group.barrier()
    rpc.shutdown()


def _medians_us(engine: Any, case: Callable[[], Any]) -> tuple[float, float, float]:
    """Time a case without an engine, with an engine, and within a context, in turn.

    The callee always has an engine.
    """
    rpc.rpc_sync("worker1", _register)
    times: list[list[float]] = [[], [], []]
    for block in range(BLOCKS):
        for way in range(3):
            interceptor.register(engine if way else None)
            engine.context = 7 * (way == 2)
            for _ in range(CALLS):
                start = time.perf_counter()
                case()
                if block:
                    times[way].append(1e6 * (time.perf_counter() - start))
    engine.context = 0
    interceptor.register(None)
    plain, idle, within = (float(np.median(series)) for series in times)
    return plain, idle, within


def _register() -> None:
    stand_in: Any = Engine()
    interceptor.register(stand_in)


if __name__ == "__main__":
    main()
