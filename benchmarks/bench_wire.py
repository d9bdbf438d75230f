"""Time wire formats of the sharded optimizer: the exchange of parameters after a step.

mpirun --bind-to none -n 2 python benchmarks/bench_wire.py
benchmarks/slow_link.sh 1gbit MPIRUN python benchmarks/bench_wire.py    (MPICH's mpirun)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import cycle, pairwise
from typing import Any

import torch

from harness import benchmark_options, devices, report, timing
from harness.goals import Goal, judge
from harness.job import Job
from mpidist.kernels.quantize import blocks_in, dequantize_add, quantize_change
from mpidist.zero.wire.formats import wire_of
from mpidist.zero.wire.int8 import section_nbytes
from mpidist.zero.wire.wire import Wire

_NUMEL = 1 << 23
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = (*_HALVES, "int8")
_ALONE = "int8, no network"
# On a device and one node, where a narrow wire saves copies between ranks and costs kernels.
GOALS = tuple(
    Goal(
        f"{name} on one node: time over fp32's ≤ 1",
        "share", "fp32", name, "ratio_of_rounds", 1.0, True, lambda size: True,
    )
    for name in ("bf16", "int8")
)  # fmt: skip


class Shared:
    """Flat buffer, this rank's shard, and two alternating masters, so each share has a change."""

    def __init__(self, group: Any, numel: int, device: torch.device) -> None:
        part = -(-numel // group.size // 64) * 64
        self.group, self.bounds = group, [min(rank * part, numel) for rank in range(group.size + 1)]
        torch.manual_seed(0)
        start = torch.randn(numel) * 0.02
        # Changes like those of an Adam step: of one size, within a factor of ten.
        self.truths = [start, start + 1e-3 * torch.randn(numel).sign() * torch.rand(numel).add(0.1)]
        self.flat = start.to(device, copy=True)
        own = slice(self.bounds[group.rank], self.bounds[group.rank + 1])
        self.masters = [truth[own].to(device, copy=True) for truth in self.truths]
        self.parts = [self.flat[start:stop] for start, stop in pairwise(self.bounds)]

    def by(self, wire: Wire) -> Callable[[], object]:
        """Return a call that shares the two masters alternately."""
        masters = cycle(self.masters)
        return lambda: wire.share(self.group, next(masters), self.flat, self.bounds)

    def whole(self) -> Callable[[], object]:
        """Return a call that gathers uncompressed parameters."""
        return partial(self.group.all_gather, self.parts, self.parts[self.group.rank])

    def arithmetic(self) -> Callable[[], object]:
        """Return a call with the arithmetic of an int8 share of the same size, without sending."""
        masters, own = cycle(self.masters), self.parts[self.group.rank]
        q = torch.empty(own.numel(), dtype=torch.int8, device=own.device)
        scales = torch.empty(blocks_in(own.numel()), device=own.device)

        def compute() -> None:
            quantize_change(next(masters), own, q, scales)
            for _ in self.parts:
                dequantize_add(own, q, scales)

        return compute

    def require(self, name: str, call: Callable[[], object]) -> None:
        """Check one contender: correct parameters that are equal on all ranks.

        Raises:
            RuntimeError: The check fails on this rank.
        """
        for truth, master in zip(self.truths, self.masters, strict=True):
            if name == "fp32":
                self.parts[self.group.rank].copy_(master)
            # On the host .cpu() does not copy.
            before = self.flat.cpu().clone()
            call()
            got = self.flat.cpu()
            if name == "int8":
                # Tolerance: half a step of the block with the largest change. All blocks here are
                # within a factor of two.
                is_right = bool(
                    ((got - truth).abs() <= 0.51 / 127 * (truth - before).abs().max()).all()
                )
            else:
                is_right = torch.equal(
                    got, truth if name == "fp32" else truth.to(_HALVES[name]).float()
                )
            sums = self.group.all_gather_object(got.view(torch.int32).sum(dtype=torch.int64).item())
            if not is_right or len(set(sums)) > 1:
                raise RuntimeError(
                    f"wrong result of {name}: off by {(got - truth).abs().max()}, sums of bits "
                    f"{sums}"
                )


def main() -> None:
    options = _arguments()
    device = devices.chosen(options.device)
    with Job(device=device) as job:
        timing.touch_memory()
        wires = {name: wire_of(name) for name in _NAMES}
        calls: dict[str, Callable[[], object]] = {}
        for name in ("fp32", *_NAMES):
            shared = Shared(job.group, options.numel, device)
            wire = wires.get(name)
            calls[name] = shared.whole() if wire is None else shared.by(wire)
            shared.require(name, calls[name])
        calls[_ALONE] = shared.arithmetic()
        contenders = [
            timing.Contender(name, (devices.awaited(call, device),), ())
            for name, call in calls.items()
        ]
        series = timing.time_rounds(job.raw, contenders, options.rounds, options.burst_s)
        result = report.result_of("share", options.numel, 4 * options.numel, series)
        for name, values in result["contenders"].items():
            values["bytes_of_a_rank"] = _nbytes(name, shared.bounds)
        if job.is_first:
            print(report.table([result]), flush=True)
            is_judged = device.type == "cuda" and job.about["nodes"] == 1 and not options.link
            fields = {
                "link": options.link,
                "rounds": options.rounds,
                "burst_s": options.burst_s,
                "results": [result],
            }
            verdicts = judge([result] if is_judged else [], GOALS)
            parts = ["" if device.type == "cpu" else devices.name_of(device), options.link]
            job.write(options.output, "wire", fields, verdicts, parts)


def _nbytes(name: str, bounds: list[int]) -> int:
    """Return the most bytes that a rank sends and receives; 0 for one rank."""
    if name == _ALONE:
        return 0
    parts = [stop - start for start, stop in pairwise(bounds)]
    sizes = [
        section_nbytes(part) if name == "int8" else part * (4 if name == "fp32" else 2)
        for part in parts
    ]
    return sum(sizes) + (len(sizes) - 2) * max(sizes)


def _arguments() -> argparse.Namespace:
    parser = benchmark_options.parser(__doc__, "link", rounds=15, burst_s=0.02)
    parser.add_argument(
        "--numel", type=int, default=_NUMEL, help="fp32 parameters of the flat buffer"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the parameters are"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
