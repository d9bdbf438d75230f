"""Time all-reduces in rank order, plain ones and MPI's own, and exact averages of gradients.

mpirun --oversubscribe -n 3 python benchmarks/bench_determinism.py
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter
from typing import Any

import torch

from harness import benchmark_options, timing
from harness.job import Job
from mpidist.comm import AVG, ProcessGroup
from mpidist.ddp.hooks.exact import ExactAverage, exact_average_hook

SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
GOAL_BYTES, GOAL = 16 << 20, 1.2
EXACT_GOAL = 8


def main() -> None:
    parser = benchmark_options.parser(__doc__, rounds=15, burst_s=0.02)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES", help="of fp32 tensors"
    )
    parser.add_argument(
        "--exact", type=int, nargs="*", default=[16 << 20], metavar="BYTES", help="of gradients"
    )
    options = parser.parse_args()
    with Job() as job:
        plain, ordered = job.group.clone("plain"), job.group.clone("order")
        # As MPIDIST_DETERMINISTIC=order sets it for all groups of a job.
        ordered._comm.adds_in_rank_order = True
        timing.touch_memory()
        rows = [_row(job.raw, plain, ordered, nbytes, options) for nbytes in options.sizes]
        exact = [_exact(plain, nbytes, options.rounds) for nbytes in options.exact]
        if job.is_first:
            fields = {"rounds": options.rounds, "rows": rows, "exact": exact}
            job.write(options.output, "determinism", fields)


def _row(
    raw: Any, plain: ProcessGroup, ordered: ProcessGroup, nbytes: int, options: argparse.Namespace
) -> dict[str, float]:
    """Return medians of one size, in microseconds; print them on rank 0."""
    from mpi4py import MPI

    flat = torch.empty(nbytes // 4)
    array, own = flat.numpy(), 0.1 * (raw.rank + 1)
    calls = {
        "mpi4py": lambda: raw.Allreduce(MPI.IN_PLACE, array),
        "plain": lambda: plain.all_reduce(flat),
        "order": lambda: ordered.all_reduce(flat),
    }
    expected = torch.full((1,), 0.1)
    for rank in range(1, raw.size):
        expected += torch.full((1,), 0.1 * (rank + 1))
    flat.fill_(own)
    ordered.all_reduce(flat)
    if not bool((flat == expected).all()):
        raise SystemExit(f"order of {nbytes} bytes is wrong: {flat[:3]}, not {expected}")
    flat.zero_()  # sums of zeros stay zeros
    contenders = [timing.Contender(name, (call,), (flat,)) for name, call in calls.items()]
    series = timing.time_rounds(raw, contenders, options.rounds, options.burst_s)
    row = {"bytes": nbytes, **{f"{one.name}_us": one.median_us for one in series}}
    row["over_plain"] = row["order_us"] / row["plain_us"]
    if raw.rank == 0:
        goal = ""
        if nbytes == GOAL_BYTES:
            goal = f"  (goal {GOAL}: {'met' if row['over_plain'] <= GOAL else 'missed'})"
        print(
            f"{nbytes:>10} B  mpi4py {row['mpi4py_us']:>9.1f} us  plain {row['plain_us']:>9.1f} "
            f"us  order {row['order_us']:>9.1f} us  {row['over_plain']:.2f}{goal}",
            flush=True,
        )
    return row


class _Bucket:
    """A bucket of one gradient."""

    def __init__(self, group: ProcessGroup, gradient: torch.Tensor) -> None:
        self._group, self._gradient = group, gradient

    def index(self) -> int:
        return 0

    def names(self) -> tuple[str, ...]:
        return ("weight",)

    def gradients(self) -> list[torch.Tensor]:
        return [self._gradient]

    def buffer(self) -> torch.Tensor:
        return self._gradient

    def group(self) -> ProcessGroup:
        return self._group


def _exact(group: ProcessGroup, nbytes: int, rounds: int) -> dict[str, float]:
    """Return the medians of exact averages and a plain one, in milliseconds.

    ``exact`` is of one backward pass a rank, ``accumulated`` of two, of which one was in a sum.
    """
    gradient = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(group.rank))
    flat, parameter = gradient.clone(), torch.nn.Parameter(torch.zeros_like(gradient))
    is_averaging = True
    state = ExactAverage([("weight", parameter)], lambda: is_averaging)
    bucket: Any = _Bucket(group, flat)
    calls = {
        "plain": lambda: group.all_reduce(flat, AVG),
        "exact": lambda: exact_average_hook(state, bucket).wait(),
        "accumulated": lambda: exact_average_hook(state, bucket).wait(),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    means = {}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            flat.copy_(gradient)
            if name == "accumulated":
                is_averaging = False
                torch.dot(parameter, gradient).backward()
                is_averaging = True
            group.barrier()
            start = perf_counter()
            call()
            if turn:
                times[name].append(perf_counter() - start)
            else:
                means[name] = flat.clone()
    # The same gradient twice has the mean of the gradient, to the last bit.
    if not torch.equal(means["exact"], means["accumulated"]):
        raise SystemExit(f"exact averages of {nbytes} bytes differ")
    torch.testing.assert_close(means["exact"], means["plain"])
    row = {"bytes": nbytes, **{f"{name}_ms": 1e3 * median(times[name]) for name in calls}}
    row["over_plain"] = row["exact_ms"] / row["plain_ms"]
    row["accumulated_over_plain"] = row["accumulated_ms"] / row["plain_ms"]
    if group.rank == 0:
        print(
            f"{nbytes:>10} B  average: plain {row['plain_ms']:.2f} ms  exact "
            f"{row['exact_ms']:.2f} ms  {_with_goal(row['over_plain'])}  accumulated "
            f"{row['accumulated_ms']:.2f} ms  {_with_goal(row['accumulated_over_plain'])}",
            flush=True,
        )
    return row


def _with_goal(ratio: float) -> str:
    return f"{ratio:.1f}  (goal {EXACT_GOAL}: {'met' if ratio <= EXACT_GOAL else 'missed'})"


if __name__ == "__main__":
    main()
