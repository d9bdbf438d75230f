"""Time of a data-parallel step: computing, overlapped buckets, compressing hooks. Pure.

A bucket is ready at a share of the step's computing. Its hook computes first, which delays the
backward pass (same core, or same GPU). Then its bytes travel, one bucket after another on one
channel: in parallel to the backward pass between nodes, but serially on one node of CPU ranks,
where a transfer is processor time (``mpidist/ddp/hooks/default.py``).

Letters: n × m a gradient as a matrix; r the rank of its approximation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpidist.ddp.buckets import plan
from mpidist.ddp.hooks import lowrank
from scaling.cost_model import Point, Times
from training.gradient_lists import Shape

HOOKS = ("none", "bf16", "powersgd-1", "powersgd-4", "powersgd-16")
# Share of the forward pass: the backward pass has two products per product of the forward pass.
FORWARD_SHARE = 1 / 3
# PowerSGD's hook does not compress tensors that shrink less.
_LEAST_RATE = 2


@dataclass(frozen=True)
class Bucket:
    """Shapes of the gradients, and the share of the step's computing after which all are ready."""

    shapes: tuple[Shape, ...]
    ready: float

    @functools.cached_property
    def numel(self) -> int:
        return sum(map(math.prod, self.shapes))

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.shapes, self.ready))


@dataclass(frozen=True)
class HookCost:
    """Computing of a hook on one rank: seconds per element and per bucket."""

    element_s: float = 0.0
    bucket_s: float = 0.0


@dataclass(frozen=True)
class Contention:
    """Computing that a transfer delays beyond its own time, on ranks that share a machine's cores.

    A message wakes the group's thread and the peer's, which take the core that computes, and finds
    its gradients in no cache; between nodes the kernel's copies take cores as well.
    """

    message_s: float = 0.0
    byte_s: float = 0.0


@dataclass(frozen=True)
class Layout:
    """Placement of the ranks.

    Attributes:
        rate_gbit_s: Rate of the link between nodes.
        share: Ranks per core.
        crowding: Time of a rank's computing beside the other ranks of its machine, relative to that
            of a rank alone: they share caches, memory and clock.
    """

    nodes: int
    ranks_per_node: int
    rate_gbit_s: float = math.inf
    share: float = 1.0
    crowding: float = 1.0

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Step:
    """Predicted step in seconds; ``exposed_s`` is the time beyond its computing."""

    seconds: float
    exposed_s: float
    sent_bytes: int


def overlapped(
    compute_s: float,
    ready_s: Sequence[float],
    host_s: Sequence[float],
    wire_s: Sequence[float],
    overlaps: bool,
) -> float:
    """Return the length of a step whose buckets travel in order on one channel.

    Args:
        ready_s: Time of each bucket's readiness without the hooks before it; ascending.
        host_s: Computing of each bucket's hook.
        wire_s: Travel time of each bucket.
        overlaps: Whether the rank computes during the travel.
    """
    hooks_s = channel_s = 0.0
    for ready, host, wire in zip(ready_s, host_s, wire_s, strict=True):
        hooks_s += host
        if overlaps:
            channel_s = max(channel_s, ready + hooks_s) + wire
        else:
            hooks_s += wire
    return max(compute_s + hooks_s, channel_s)


def buckets_of(shapes: Sequence[Shape], bucket_cap_mb: float | None = None) -> list[Bucket]:
    """Return the buckets of a network's gradients; backward time is proportional to elements."""
    sizes = [torch.empty(shape, device="meta") for shape in shapes]
    assigned = plan.assign(
        sizes, plan.limits_of(bucket_cap_mb), order=range(len(shapes) - 1, -1, -1)
    )
    whole = sum(map(math.prod, shapes))
    buckets, passed = [], 0
    for places in assigned:
        own = tuple(tuple(shapes[place]) for place in places)
        passed += sum(map(math.prod, own))
        buckets.append(Bucket(own, FORWARD_SHARE + (1 - FORWARD_SHARE) * passed / whole))
    return buckets


@functools.lru_cache(maxsize=1 << 14)
def messages(bucket: Bucket, hook: str) -> tuple[int, ...]:
    """Return the bytes of each all-reduce that a hook makes for a bucket of fp32.

    Raises:
        ValueError: The hook is unknown.
    """
    if hook == "none":
        return (4 * bucket.numel,)
    if hook == "bf16":
        return (2 * bucket.numel,)
    kind, _, wanted = hook.partition("-")
    if kind != "powersgd" or not wanted.isdigit():
        raise ValueError(f"no hook {hook!r}; there are {', '.join(HOOKS)}")
    first = second = 0  # P and uncompressed tensors; Q
    for shape in bucket.shapes:
        numel = math.prod(shape)
        if lowrank.is_compressible(shape, int(wanted), _LEAST_RATE):
            n, m = shape[0], numel // shape[0]
            r = lowrank.rank_of(n, m, int(wanted))
            first, second = first + n * r, second + m * r
        else:
            first += numel
    return tuple(4 * numel for numel in (first, second) if numel)


def step(
    compute_s: float,
    buckets: Sequence[Bucket],
    hook: str,
    layout: Layout,
    fits: Mapping[str, Times],
    costs: Mapping[str, HookCost],
    contention: Contention = Contention(),
) -> Step:
    """Predict a step.

    Args:
        compute_s: Forward and backward pass of one rank with its own core or GPU.
        fits: ``all_reduce`` of the layout's class of links; on one node also ``average``, which DDP
            uses there without a hook.
        contention: Of the layout's class of links; none where each rank has a machine.
    """
    sent = [messages(bucket, hook) for bucket in buckets]
    slower = layout.share * layout.crowding
    compute_s *= slower
    cost = costs.get(hook, HookCost())
    host = [
        slower * (cost.element_s * bucket.numel + cost.bucket_s)
        + layout.share * (contention.message_s * len(each) + contention.byte_s * sum(each))
        for bucket, each in zip(buckets, sent, strict=True)
    ]
    operation = (
        "average" if layout.nodes == 1 and hook == "none" and "average" in fits else "all_reduce"
    )
    time_of = _timer(fits[operation], operation, layout)
    wire = [sum(map(time_of, each)) for each in sent]
    seconds = overlapped(
        compute_s, [bucket.ready * compute_s for bucket in buckets], host, wire, layout.nodes > 1
    )
    return Step(seconds, seconds - compute_s, sum(map(sum, sent)))


def _timer(times: Times, operation: str, layout: Layout) -> Callable[[int], float]:
    @functools.cache  # many buckets have equal sizes
    def seconds(nbytes: int) -> float:
        return times.seconds(
            Point(
                operation,
                layout.nodes,
                layout.ranks_per_node,
                nbytes,
                layout.rate_gbit_s,
                layout.share,
            )
        )

    return seconds


def compute_of(batches_s: Mapping[int, float], batch: int) -> float:
    """Return the computing of a batch, linear in two measured batches or proportional to one."""
    (small, small_s), (large, large_s) = min(batches_s.items()), max(batches_s.items())
    if small == large:
        return small_s * batch / small
    return max(small_s + (large_s - small_s) * (batch - small) / (large - small), 0.0)


def hook_costs(steps: Sequence[Mapping[str, Any]]) -> dict[str, HookCost]:
    """Return the hooks' costs per element, as median over the networks of one rank's steps."""
    found: dict[str, list[float]] = {}
    for one in steps:
        for hook, added_us in one["exposed_us"].items():
            if hook != "none":  # a rank by itself sends nothing
                found.setdefault(hook, []).append(max(added_us, 0.0) / 1e6 / one["parameters"])
    return {hook: HookCost(sorted(values)[len(values) // 2]) for hook, values in found.items()}
