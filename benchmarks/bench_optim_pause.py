"""Pauses of other Python threads during steps of functional optimizers over 8.4 M parameters.

python benchmarks/bench_optim_pause.py
python benchmarks/bench_optim_pause.py --threads 1    (torch's threads leave cores to the tick)

A second thread sleeps 0.5 ms repeatedly and records its delay. To continue, the thread needs
Python's lock and a core. The contender "nothing" sleeps in the main thread: the delay without a
step.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from harness import benchmark_options, environment, report, tables
from mpidist import comm
from mpidist.optim import functional

_NUMEL = 1 << 23
_TICK_S = 0.0005
_LIMIT_MS = 10.0
_OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "Adam": {"amsgrad": True}}
_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


class Ticks:
    """Ticking thread of a ``with`` block.

    Attributes:
        late_ms: Delay of each tick.
    """

    def __init__(self) -> None:
        self.late_ms: list[float] = []
        self._is_over = False
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Ticks:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over = True
        self._thread.join()

    def _run(self) -> None:
        before = time.perf_counter()
        while not self._is_over:
            time.sleep(_TICK_S)
            now = time.perf_counter()
            self.late_ms.append(1e3 * (now - before - _TICK_S))
            before = now


def main() -> None:
    parser = benchmark_options.parser(__doc__, "quick")
    parser.add_argument(
        "--tensors",
        type=int,
        nargs="+",
        default=[1, 256],
        help="over how many tensors the parameters are spread",
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    numel, steps = (1 << 14, 3) if options.quick else (_NUMEL, options.steps)
    rows = [
        {
            "optimizer": "nothing",
            "kernel": "",
            "tensors": 0,
            **measured(lambda: time.sleep(0.02), steps),
        }
    ]
    for count in options.tensors:
        rows += [
            one(name, fused, numel, count, steps)
            for name in functional.__all__
            for fused in kernels_of(name)
        ]
    comm.init()
    from mpi4py import MPI

    print(tables.text([list(row.values()) for row in rows], list(rows[0]), floats=".2f"))
    record = {
        "benchmark": "optim-pause",
        "environment": environment.describe(MPI.COMM_SELF),
        "switch_interval_ms": 1e3 * sys.getswitchinterval(),
        "limit_ms": _LIMIT_MS,
        "numel": numel,
        "steps": steps,
        "results": rows,
    }
    report.write_json(record, options.output / f"optim-pause-{options.threads}.json")
    worst = max(
        (row for row in rows if row["kernel"] == "fused"), key=lambda row: row["longest pause, ms"]
    )
    print(
        f"longest pause in a fused step: {worst['longest pause, ms']:.1f} ms "
        f"({worst['optimizer']}), limit {_LIMIT_MS} ms"
    )


def kernels_of(name: str) -> tuple[bool, ...]:
    """Return the implementations of an optimizer class: fused or not."""
    if name == "FunctionalOptimizer":
        return ()
    return (True, False) if name in _FUSED else (False,)


def one(name: str, fused: bool, numel: int, count: int, steps: int) -> dict[str, Any]:
    """Measure one optimizer, including its first step, which creates the state.

    Raises:
        RuntimeError: A step of one tensor differs from torch's own loop.
    """
    parameters = [torch.nn.Parameter(torch.ones(numel // count)) for _ in range(count)]
    gradients: list[torch.Tensor | None] = [
        torch.linspace(-1, 1, numel // count) for _ in range(count)
    ]
    settings = {
        **_OPTIONS.get(name, {}),
        **({} if fused or name not in _FUSED else {"fused": False}),
    }
    optimizer = getattr(functional, name)(parameters, **settings)
    found = measured(lambda: optimizer.step(gradients), steps)
    twin = torch.nn.Parameter(torch.ones(numel // count))
    loop = getattr(torch.optim, name)([twin], **_OPTIONS.get(name, {}), foreach=False)
    twin.grad = gradients[0]
    for _ in range(steps):
        loop.step()
    if not torch.allclose(twin, parameters[-1], rtol=1e-4, atol=1e-5):
        raise RuntimeError(
            f"{name} over {count} tensors: parameters differ from torch's by "
            f"{(twin - parameters[-1]).abs().max()}"
        )
    return {"optimizer": name, "kernel": "fused" if fused else "loop", "tensors": count, **found}


def measured(step: Callable[[], Any], steps: int) -> dict[str, float]:
    """Run steps while another thread ticks."""
    times = []
    with Ticks() as ticks:
        for _ in range(steps):
            start = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - start))
    late = sorted(ticks.late_ms)
    return {
        "first step, ms": times[0],
        "step, ms": statistics.median(times),
        "longest pause, ms": late[-1],
        "99 % of pauses below, ms": late[int(0.99 * len(late))],
    }


if __name__ == "__main__":
    main()
