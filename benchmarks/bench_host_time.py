"""Host time of DDP on CUDA tensors, per bucket: Python's part of a backward pass, without a GPU.

python benchmarks/bench_host_time.py
mpirun --bind-to none -n 2 python benchmarks/bench_host_time.py    (all-reduces of two ranks)

No GPU work runs, and the figures say nothing about a GPU: see ``empty_device``. Networks are scaled
down, each dimension by the same factor and buckets by its square, so that buckets hold the same
tensors and torch's own work is negligible.
"""

from __future__ import annotations

import argparse
import cProfile
import math
import os
import pstats
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cuda_kernels.empty_device import in_place_of_cuda
from harness import benchmark_options
from harness.job import Job
from mpidist import ddp
from training.gradient_lists import LISTS, Shape

Tensor = torch.Tensor

_SHRUNK_BY = 16
_BUCKET_MIB = 25.0
_LEAST_RATE = 2.0
HOOKS = ("average", "powerSGD")


class _Given(torch.autograd.Function):
    """Scalar function of all parameters whose backward pass returns prepared gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, *ignored: Tensor) -> Any:
        # Autograd keeps these tensors without a copy: the same memory in each step, as torch's
        # caching allocator returns on a device.
        return (None, *(gradient.detach() for gradient in ctx.gradients))


class Model(torch.nn.Module):
    """Parameters of a scaled-down network, with an almost empty forward pass."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.zeros(shrunk(shape)) for shape in shapes])
        self.gradients = [torch.randn_like(p) for p in self.weights]

    def forward(self) -> Tensor:
        return _Given.apply(self.gradients, *self.weights)


def shrunk(shape: Shape) -> Shape:
    """Return a shape with its first two dimensions divided."""
    return (*(max(size // _SHRUNK_BY, 1) for size in shape[:2]), *shape[2:])


def wrapped(shapes: Sequence[Shape], hook: str, as_views: bool) -> ddp.DistributedDataParallel:
    """Return the network in DDP, with the buckets of its full size."""
    cap = _BUCKET_MIB / _SHRUNK_BY**2
    module = ddp.DistributedDataParallel(
        Model(shapes), bucket_cap_mb=cap, gradient_as_bucket_view=as_views
    )
    if hook == "powerSGD":
        # Both dimensions of a matrix shrink alike, so PowerSGD compresses the same matrices.
        state = ddp.PowerSGDState(
            None, 4, start_powerSGD_iter=0, min_compression_rate=_LEAST_RATE / _SHRUNK_BY
        )
        module.register_comm_hook(state, ddp.powerSGD_hook)
    return module


def step_of(module: torch.nn.Module, keeps_gradients: bool) -> Callable[[], None]:
    """Return one forward and backward pass; gradients are None before the pass, or accumulate."""

    def step() -> None:
        if not keeps_gradients:
            for parameter in module.parameters():
                parameter.grad = None
        module().backward()

    return step


def best(steps: Sequence[Callable[[], None]], rounds: int) -> list[tuple[float, float]]:
    """Return each step's shortest wall time and shortest CPU time of all threads, in us."""
    for step in steps:
        for _ in range(5):
            step()
    found = [(math.inf, math.inf)] * len(steps)
    for _ in range(rounds):
        for place, step in enumerate(steps):
            start, start_cpu = time.perf_counter(), time.process_time()
            step()
            wall_us, cpu_us = (
                (time.perf_counter() - start) * 1e6,
                (time.process_time() - start_cpu) * 1e6,
            )
            found[place] = (min(found[place][0], wall_us), min(found[place][1], cpu_us))
    return found


def measure(name: str, hook: str, kind: str, rounds: int, counts: Counter[str]) -> dict[str, Any]:
    """Return the time that DDP adds to a step of the network, per bucket."""
    shapes = LISTS[name]()
    keeps = kind == "views kept"
    module = wrapped(shapes, hook, as_views=kind != "copied back")
    bare, ours = step_of(Model(shapes), keeps), step_of(module, keeps)
    (bare_us, bare_cpu_us), (ours_us, ours_cpu_us) = best([bare, ours], rounds)
    counts.clear()
    ours()
    buckets = len(module.reducer.layout.plan)
    return {
        "network": name,
        "hook": hook,
        "gradients": kind,
        "buckets": buckets,
        "tensors": len(shapes),
        "us": (ours_us - bare_us) / buckets,
        "cpu_us": (ours_cpu_us - bare_cpu_us) / buckets,
        "counts": {what: count / buckets for what, count in sorted(counts.items())},
    }


def main() -> None:
    """Measure and print. Collective over all ranks of the job."""
    options = _arguments()
    # The memory of this device is host memory, which any MPI accepts.
    os.environ.setdefault("MPIDIST_CUDA_AWARE", "1")
    with Job(least=1) as job, in_place_of_cuda() as counts:
        if options.profile:
            _profile(options, job.group)
            return
        rows = []
        for name in options.networks:
            for hook in options.hooks:
                for kind in options.gradients:
                    rows.append(measure(name, hook, kind, options.rounds, counts))
                    if job.is_first:
                        print(_line(rows[-1]), flush=True)
        if job.is_first:
            job.write(options.output, "host-time", {"rounds": options.rounds, "results": rows})
    job.group.close()


def _line(row: dict[str, Any]) -> str:
    counts = ", ".join(f"{count:.3g} {what}" for what, count in row["counts"].items())
    head = (
        f"{row['network']:<10} {row['hook']:<8} {row['gradients']:<11} {row['buckets']:>3} "
        f"buckets of {row['tensors']} tensors"
    )
    return (
        f"{head}\n    {row['us']:.1f} us a bucket, {row['cpu_us']:.1f} us of the processors; "
        f"{counts}"
    )


def _profile(options: argparse.Namespace, group: Any) -> None:
    module = wrapped(
        LISTS[options.networks[0]](),
        options.hooks[0],
        as_views=options.gradients[0] != "copied back",
    )
    step = step_of(module, options.gradients[0] == "views kept")
    for _ in range(5):
        step()
    profilers = {"calling thread": cProfile.Profile(), "group's thread": cProfile.Profile()}
    profilers["calling thread"].enable()
    group.in_order(profilers["group's thread"].enable).wait()
    for _ in range(options.rounds):
        step()
    profilers["calling thread"].disable()
    group.in_order(profilers["group's thread"].disable).wait()
    for thread, profiler in profilers.items():
        print(f"{thread}, {options.rounds} steps of {len(module.reducer.layout.plan)} buckets")
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def _arguments() -> argparse.Namespace:
    parser = benchmark_options.parser(__doc__, rounds=200)
    parser.add_argument(
        "--networks",
        nargs="+",
        default=["ResNet-50", "GPT-2"],
        choices=list(LISTS),
        metavar="NAME",
        help=", ".join(LISTS),
    )
    parser.add_argument("--hooks", nargs="+", default=list(HOOKS), choices=HOOKS)
    kinds = ["views kept", "views", "copied back"]
    parser.add_argument(
        "--gradients",
        nargs="+",
        default=kinds,
        choices=kinds,
        metavar="KIND",
        help=", ".join(map(repr, kinds)),
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="show where both threads' time goes, for the first choices",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
