"""Prediction of the fastest communication hook, by bandwidth, network size and number of ranks.

There are two kinds of processor. ``cpu`` is the measured one, with its hooks, its computing and its
host's part of a message. ``gpu`` uses the hooks' costs on an H100
(``results/kernels-nvidia-h100-80gb-hbm3.json``), an assumed computing rate (``GPU_FLOP_RATE``), and
a network that accesses GPU memory directly (no term for bytes within the node). Latencies are the
measured ones, of TCP.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scaling import cost_model, steps
from scaling import model as models
from training import gradient_lists
from training.gradient_lists import Shape

BANDWIDTHS = (0.1, 1.0, 10.0, 25.0, 100.0, 200.0)  # Gbit/s
RANKS = (4, 64, 1024, 4096)
# Samples per rank; each uses every weight once.
CPU_SAMPLES = 64
# Tokens per rank, and 40 % of an H100's peak when training in bf16.
GPU_SAMPLES, GPU_FLOP_RATE = 8192, 4e14
GPU_FILE = Path(__file__).resolve().parents[1] / "results" / "kernels-nvidia-h100-80gb-hbm3.json"
# In Gbit/s; choices are searched between these.
LEAST_GBIT_S, MOST_GBIT_S = 0.01, 1000.0
_STEPS = 26
_HALVINGS = 6


@dataclass(frozen=True)
class Case:
    """Step to predict; ``compute_s`` is the time of one rank's forward and backward pass."""

    compute_s: float
    buckets: Sequence[steps.Bucket]
    ranks: int
    ranks_per_node: int = 1


@dataclass(frozen=True)
class Processor:
    """Processor of a rank: costs of hooks, all-reduces between nodes, and operations per second."""

    name: str
    costs: Mapping[str, steps.HookCost]
    fits: Mapping[str, cost_model.Fit]
    flop_rate: float
    samples: int

    def compute_s(self, parameters: float) -> float:
        """Return the computing time of a step: 6 operations per parameter and sample."""
        return 6 * parameters * self.samples / self.flop_rate


def shapes_of(parameters: int) -> list[Shape]:
    """Return gradient shapes for a number of parameters: GPT-2's, or GPT-2 XL's from 500 million.

    The list is cut or repeated.
    """
    whole = gradient_lists.gpt2_xl() if parameters >= 500e6 else gradient_lists.gpt2()
    # A small network has no embedding of words.
    return gradient_lists.cut(whole if parameters >= 50e6 else whole[2:], parameters)


NETWORKS = {
    "1 M": lambda: shapes_of(1_000_000),
    "10 M": lambda: shapes_of(10_000_000),
    "ResNet-50, 26 M": gradient_lists.resnet50,
    "100 M": lambda: shapes_of(100_000_000),
    "GPT-2, 124 M": gradient_lists.gpt2,
    "1 B": lambda: shapes_of(1_000_000_000),
}


def processors(model: models.Model) -> list[Processor]:
    """Return the processors with predictions; none without measured links."""
    fits = model.fits.get(models.BETWEEN, {})
    if "all_reduce" not in fits:
        return []
    found = []
    if model.costs and model.flop_rate:
        found.append(Processor("cpu", model.costs, fits, model.flop_rate, CPU_SAMPLES))
    if GPU_FILE.exists():
        data = json.loads(GPU_FILE.read_text(encoding="utf-8"))
        by_itself = {name: without_host_bytes(fit) for name, fit in fits.items()}
        found.append(Processor("gpu", gpu_costs(data), by_itself, GPU_FLOP_RATE, GPU_SAMPLES))
    return found


def without_host_bytes(fit: cost_model.Fit) -> cost_model.Fit:
    """Return a fit without the cost of bytes on a node's processor, and what its terms miss."""
    place = cost_model.TERMS.index("node bytes")
    parameters = tuple((*row[:place], 0.0, *row[place + 1 :]) for row in fit.parameters)
    return replace(fit, parameters=parameters, ratios=())


def gpu_costs(data: Mapping[str, Any]) -> dict[str, steps.HookCost]:
    """Return the hooks' costs from a record of ``bench_kernels.py``.

    PowerSGD's cost at rank 16 extrapolates the costs at ranks 4 and 8.
    """
    hooks = {
        rank: statistics.median(
            one["contenders"]["powerSGD_hook"]["issued"]["median_us"] / 1e6 / one["numel"]
            for one in data["powersgd"]
            if one["rank"] == rank
        )
        for rank in (1, 4, 8)
    }
    largest = max(data["copies"], key=lambda one: one["size_bytes"])
    copied_us = largest["contenders"]["device copy"]["device"]["median_us"]
    rate = 2 * largest["size_bytes"] / (copied_us / 1e6)  # bytes read and written
    narrowed = 12 / rate  # fp32 to bf16 and back: 4 + 2 + 2 + 4 bytes
    rank_16 = hooks[8] + 2 * max(hooks[8] - hooks[4], 0.0)
    each = {
        "bf16": narrowed,
        "powersgd-1": hooks[1],
        "powersgd-4": hooks[4],
        "powersgd-16": rank_16,
    }
    return {hook: steps.HookCost(seconds) for hook, seconds in each.items()}


def times(case: Case, bandwidth: float, processor: Processor) -> dict[str, float]:
    """Return the predicted seconds of a step by hook."""
    nodes = -(-case.ranks // case.ranks_per_node)
    at = steps.Layout(nodes, case.ranks_per_node, bandwidth)
    hooks = ["none", *(hook for hook in steps.HOOKS if hook in processor.costs)]
    return {
        hook: steps.step(
            case.compute_s, case.buckets, hook, at, processor.fits, processor.costs
        ).seconds
        for hook in hooks
    }


def fastest(found: Mapping[str, float]) -> str:
    """Return the fastest hook; within 0.1 %, the one that changes the gradients least."""
    shortest = min(found.values())
    order = ("none", "bf16", "powersgd-16", "powersgd-4", "powersgd-1")
    return next(hook for hook in order if hook in found and found[hook] <= 1.001 * shortest)


def crossings(case: Case, processor: Processor) -> list[tuple[str, float]]:
    """Return the fastest hooks by rising bandwidth, each with its upper limit in Gbit/s."""

    def choice(bandwidth: float) -> str:
        return fastest(times(case, bandwidth, processor))

    grid = [
        LEAST_GBIT_S * (MOST_GBIT_S / LEAST_GBIT_S) ** (place / _STEPS)
        for place in range(_STEPS + 1)
    ]
    found: list[tuple[str, float]] = []
    low, current = grid[0], choice(grid[0])
    for high in grid[1:]:
        later = choice(high)
        if later != current:
            below, above = low, high
            for _ in range(_HALVINGS):
                middle = (below * above) ** 0.5
                below, above = (middle, above) if choice(middle) == current else (below, middle)
            found.append((current, above))
            current = later
        low = high
    return [*found, (current, float("inf"))]


def table_of(model: models.Model) -> list[dict[str, Any]]:
    """Return predicted times of all hooks by processor, network, ranks and bandwidth.

    Each row has the bandwidths at which the fastest hook changes.
    """
    rows = []
    for processor in processors(model):
        for name, shapes in NETWORKS.items():
            gradients = shapes()
            buckets = steps.buckets_of(gradients)
            parameters = sum(bucket.numel for bucket in buckets)
            for ranks in RANKS:
                case = Case(processor.compute_s(parameters), buckets, ranks)
                by_rate = {f"{rate:g}": times(case, rate, processor) for rate in BANDWIDTHS}
                rows.append(
                    {
                        "processor": processor.name,
                        "network": name,
                        "parameters": parameters,
                        "ranks": ranks,
                        "compute_s": case.compute_s,
                        "predicted_seconds": by_rate,
                        "fastest": {rate: fastest(found) for rate, found in by_rate.items()},
                        "fastest_up_to_gbit_s": [
                            [hook, rate] for hook, rate in crossings(case, processor)
                        ]
                        if ranks == 64
                        else None,
                    }
                )
    return rows
