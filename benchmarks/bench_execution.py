"""Time all-reduces executed in the caller, on the group's thread, and by MPI's non-blocking call.

mpirun --bind-to none -n 2 python benchmarks/bench_execution.py    (also with --bind-to core)

These are the figures of docs/decisions/0001 and 0018: the case "torch" has the ways through
``torch.distributed``, the observed one (under a TorchDispatchMode) among them. The case "looks"
(``--only looks``) measures the checks that an operation makes for torch's tools while the tools are
off: whether a profiler runs, and, in a torch group, the number of dispatch modes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler as torch_profiler
from torch.distributed import _functional_collectives as functional
from torch.utils._python_dispatch import TorchDispatchMode

from harness import benchmark_options, report, tables, timing
from harness.job import Job
from harness.timing import Contender

_SIZES_BYTES = (8, 64 << 10, 1 << 20, 16 << 20)
_OVERLAP_BYTES = 16 << 20
# Calls of each thread in one pass of the case with two groups.
_THREAD_CALLS = 200
# A thousand checks in one pass: microseconds per pass are nanoseconds per check.
_LOOKS = 1000
_ROUNDS = 15
_BURST_S = 0.02


class Ways:
    """Groups and communicator that the contenders call."""

    def __init__(self, job: Job) -> None:
        self.raw, self.mpi, self.group = job.raw, job.mpi, job.group
        self.second = self.group.clone("second")

    def all_reduces(self, tensor: torch.Tensor) -> dict[str, Callable[[], object]]:
        """Return the ways to start an all-reduce and wait for the result."""
        message = [tensor.numpy(), self.mpi.FLOAT]
        return {
            "mpi4py": lambda: self.raw.Allreduce(self.mpi.IN_PLACE, message),
            "caller": lambda: self.group.all_reduce(tensor),
            "group's thread": lambda: self.group.all_reduce(tensor, async_op=True).wait(),
            "non-blocking": lambda: self.raw.Iallreduce(self.mpi.IN_PLACE, message).Wait(),
        }


def latency(ways: Ways, numel: int) -> list[Contender]:
    """Start and wait at once: the cost of each way."""
    tensor = torch.zeros(numel)
    return [Contender(name, (call,), (tensor,)) for name, call in ways.all_reduces(tensor).items()]


class Observer(TorchDispatchMode):
    """A mode that sees every operator, and calls it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def through_torch(ways: Ways, numel: int) -> list[Contender]:
    """All-reduce through torch's API: the price of each way in, beside mpi4py."""
    tensor, mode = torch.zeros(numel), Observer()
    message = [tensor.numpy(), ways.mpi.FLOAT]

    def observed() -> None:
        with mode:
            dist.all_reduce(tensor)

    calls = {
        "mpi4py": lambda: ways.raw.Allreduce(ways.mpi.IN_PLACE, message),
        "all_reduce": lambda: dist.all_reduce(tensor),
        "all_reduce, async_op": lambda: dist.all_reduce(tensor, async_op=True).wait(),
        "functional": lambda: functional.wait_tensor(
            functional.all_reduce(tensor, "sum", dist.group.WORLD)
        ),
        "all_reduce, observed": observed,
    }
    return [Contender(name, (call,), (tensor,)) for name, call in calls.items()]


def overlap(ways: Ways, numel: int) -> list[Contender]:
    """Start, compute for about as long, and wait: the overlap of each way."""
    tensor, left = torch.zeros(numel), torch.rand(512, 512)
    message = [tensor.numpy(), ways.mpi.FLOAT]

    def compute() -> None:
        for _ in range(4):
            left @ left

    def caller() -> None:
        compute()
        ways.group.all_reduce(tensor)

    def thread() -> None:
        work = ways.group.all_reduce(tensor, async_op=True)
        compute()
        work.wait()

    def non_blocking() -> None:
        request = ways.raw.Iallreduce(ways.mpi.IN_PLACE, message)
        compute()
        request.Wait()

    calls = {
        "compute alone": compute,
        "all-reduce alone": lambda: ways.group.all_reduce(tensor),
        "caller": caller,
        "group's thread": thread,
        "non-blocking": non_blocking,
    }
    return [Contender(name, (call,), (tensor,)) for name, call in calls.items()]


def two_threads(ways: Ways, pool: ThreadPoolExecutor) -> list[Contender]:
    """Run two threads with a group each, against one thread: microseconds of 200 calls a thread."""
    first, second = torch.zeros(2), torch.zeros(2)

    def loop(group: Any, tensor: torch.Tensor) -> None:
        for _ in range(_THREAD_CALLS):
            group.all_reduce(tensor)

    def both() -> None:
        other = pool.submit(loop, ways.second, second)
        loop(ways.group, first)
        other.result()

    calls = {
        "one thread, one group": lambda: loop(ways.group, first),
        "two threads, two groups": both,
    }
    return [Contender(name, (call,), (first,)) for name, call in calls.items()]


def looks() -> list[Contender]:
    """Run an operation's checks for torch's tools, which are off, against an empty loop."""
    turns, modes = range(_LOOKS), torch._C._len_torch_dispatch_stack
    found = torch.zeros(1)

    def empty() -> None:
        for _ in turns:
            pass

    def profiler() -> None:
        for _ in turns:
            if torch_profiler._is_profiler_enabled:
                found.fill_(1)

    def mode() -> None:
        for _ in turns:
            if modes():
                found.fill_(1)

    def both() -> None:
        for _ in turns:
            if modes():
                found.fill_(1)
            if torch_profiler._is_profiler_enabled:
                found.fill_(1)

    calls = {
        "empty loop": empty,
        "a profiler": profiler,
        "a mode": mode,
        "a mode and a profiler": both,
    }
    return [Contender(name, (call,), (found,)) for name, call in calls.items()]


def cases(ways: Ways, pool: ThreadPoolExecutor) -> Iterator[tuple[str, int, list[Contender]]]:
    yield "looks", 0, looks()
    for size_bytes in _SIZES_BYTES:
        yield "latency", size_bytes, latency(ways, size_bytes // 4)
    yield "torch", 8, through_torch(ways, 2)
    yield "overlap", _OVERLAP_BYTES, overlap(ways, _OVERLAP_BYTES // 4)
    yield "two threads", 8, two_threads(ways, pool)


def check(ways: Ways) -> None:
    """Require correct sums.

    Raises:
        RuntimeError: A sum is wrong.
    """
    for name, call in ways.all_reduces(tensor := torch.zeros(1000)).items():
        tensor.fill_(ways.group.rank + 1.0)
        call()
        if not bool((tensor == ways.group.size * (ways.group.size + 1) / 2).all()):
            raise RuntimeError(f"{name}: wrong result")


def main() -> None:
    parser = benchmark_options.parser(__doc__, rounds=_ROUNDS, burst_s=_BURST_S)
    parser.add_argument("--only", help="one case: looks, latency, torch, overlap, two threads")
    options = parser.parse_args()
    results = []
    with ThreadPoolExecutor(1) as pool, Job(uses_torch=True) as job:
        ways = Ways(job)
        timing.touch_memory()
        check(ways)
        for name, size_bytes, contenders in cases(ways, pool):
            if options.only not in (None, name):
                continue
            series = timing.time_rounds(ways.raw, contenders, options.rounds, options.burst_s)
            results.append(report.result_of(name, size_bytes // 4, size_bytes, series))
            if job.is_first:
                rows = [
                    (s.name, round(s.median_us, 2), round(s.percentile_us(90), 2)) for s in series
                ]
                print(
                    f"\n{name}, {size_bytes} B\n{tables.text(rows, ('way', 'us, median', 'p90'))}",
                    flush=True,
                )
        if job.is_first:
            job.show()
            is_bound = any(len(own) < 2 for own in job.about["cores_of_ranks"])
            fields = {"rounds": options.rounds, "results": results}
            parts = ["bound" if is_bound else "unbound"]
            case = (options.only or "").replace(" ", "-")
            job.write(options.output, "execution", fields, parts=parts, case=case)
        ways.second.close()
        ways.group.close()


if __name__ == "__main__":
    main()
