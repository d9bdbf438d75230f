"""Time-independent traces of steps and of all-reduces, for SimGrid's replayer. Pure.

A step has two processes a node: rank r's communication is process r, its computing is process
W + r, and both meet by empty messages within the node. The computing process goes through the
forward and the backward pass and says when a bucket is ready, after its hook has computed; the
communicating one takes the buckets in order, each all-reduce as the messages of ``schedules``. So
traffic of one bucket delays the next one, ranks wait for each other, and messages share cables,
while all computing overlaps, as between nodes in the library. The sharded optimizer's step and its
all-gathers follow.

Letters: W ranks, one on each node.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from replay import schedules
from replay.networks import FLOP_RATE
from scaling import steps

# Bytes, as a datatype of the traces.
_BYTE = "6"
_READY_TAG, _DATA_TAG, _DONE_TAG = 1, 2, 3
# The algorithm of an all-reduce of some bytes.
Chooser = Callable[[int], str]


@dataclass(frozen=True)
class StepPlan:
    """One step of a rank.

    Attributes:
        compute_s: Forward and backward pass.
        ready_s: Time of each bucket's readiness without the hooks before it; ascending.
        host_s: Computing of each bucket's hook.
        messages: Bytes of the all-reduces of each bucket, in order.
        update_s: Step of the sharded optimizer on this rank's shard.
        gathered: Bytes of all parameters of each all-gather after it.
        is_scattered: Whether each bucket is reduced to the owners of its shards, by a
            reduce-scatter in the place of an all-reduce.
    """

    compute_s: float
    ready_s: tuple[float, ...]
    host_s: tuple[float, ...]
    messages: tuple[tuple[int, ...], ...]
    update_s: float = 0.0
    gathered: tuple[int, ...] = ()
    is_scattered: bool = False

    def __post_init__(self) -> None:
        if not len(self.ready_s) == len(self.host_s) == len(self.messages):
            raise ValueError("a plan has a time, a hook and messages for each bucket")
        if any(late < early for early, late in itertools.pairwise(self.ready_s)):
            raise ValueError("buckets are ready in order")


def plan_of(
    compute_s: float,
    buckets: Sequence[steps.Bucket],
    hook: str,
    costs: Mapping[str, steps.HookCost],
    shards: bool = False,
    update_s: float = 0.0,
    to_owners: bool = False,
) -> StepPlan:
    """Return a step's plan by the library's buckets and a hook's messages and costs.

    Args:
        compute_s: Forward and backward pass of one rank.
        buckets: Of the gradients (``steps.buckets_of``).
        hook: One of ``steps.HOOKS``.
        costs: Of the hooks.
        shards: Whether an optimizer in shards gathers all parameters after the step.
        update_s: Time of the shard's optimizer.
        to_owners: Whether a shard's rank alone gets its gradients (``hooks.to_owners``).
    """
    cost = costs.get(hook, steps.HookCost())
    return StepPlan(
        compute_s,
        tuple(bucket.ready * compute_s for bucket in buckets),
        tuple(cost.element_s * bucket.numel + cost.bucket_s for bucket in buckets),
        tuple(steps.messages(bucket, hook) for bucket in buckets),
        update_s if shards else 0.0,
        tuple(4 * bucket.numel for bucket in buckets) if shards else (),
        to_owners,
    )


def step(
    plan: StepPlan, ranks: int, choose: Chooser, add_s_per_byte: float = 0.0
) -> Iterator[Iterator[str]]:
    """Yield the lines of each process of a step: W communicating ones, then W computing ones.

    Args:
        plan: Of each rank; all have the same.
        ranks: W.
        choose: The algorithm of an all-reduce, by its bytes.
        add_s_per_byte: Time to add a received byte.
    """
    for rank in range(ranks):
        yield _communication(plan, rank, ranks, choose, add_s_per_byte)
    for rank in range(ranks):
        yield _computing(plan, rank, ranks)


def all_reduce(
    nbytes: int, ranks: int, algorithm: str, repeats: int = 1, add_s_per_byte: float = 0.0
) -> Iterator[Iterator[str]]:
    """Yield the lines of each process of ``repeats`` all-reduces, by messages."""
    for rank in range(ranks):
        one = list(
            _exchanges(
                rank, schedules.rounds(algorithm, rank, ranks, nbytes), ranks, add_s_per_byte
            )
        )
        yield _framed(rank, one * repeats)


def _framed(process: int, lines: Iterable[str]) -> Iterator[str]:
    yield f"{process} init"
    yield from lines
    yield f"{process} finalize"


def _communication(
    plan: StepPlan, rank: int, ranks: int, choose: Chooser, add_s_per_byte: float
) -> Iterator[str]:
    partner = ranks + rank
    reduced = schedules.scatter_rounds if plan.is_scattered else schedules.rounds

    def lines() -> Iterator[str]:
        for messages in plan.messages:
            yield f"{rank} recv {partner} {_READY_TAG} 1 {_BYTE}"
            for nbytes in messages:
                rounds = reduced(choose(nbytes), rank, ranks, nbytes)
                yield from _exchanges(rank, rounds, ranks, add_s_per_byte)
        if plan.gathered:
            yield f"{rank} recv {partner} {_READY_TAG} 1 {_BYTE}"
            yield from _computed(rank, plan.update_s)
            for nbytes in plan.gathered:
                rounds = schedules.gather_rounds(choose(nbytes), rank, ranks, nbytes)
                yield from _exchanges(rank, rounds, ranks, add_s_per_byte)
        yield f"{rank} send {partner} {_DONE_TAG} 1 {_BYTE}"

    return _framed(rank, lines())


def _computing(plan: StepPlan, rank: int, ranks: int) -> Iterator[str]:
    process = ranks + rank

    def lines() -> Iterator[str]:
        passed = 0.0
        for ready, host in zip(plan.ready_s, plan.host_s, strict=True):
            yield from _computed(process, ready - passed + host)
            passed = ready
            yield f"{process} send {rank} {_READY_TAG} 1 {_BYTE}"
        yield from _computed(process, plan.compute_s - passed)
        if plan.gathered:
            yield f"{process} send {rank} {_READY_TAG} 1 {_BYTE}"
        yield f"{process} recv {rank} {_DONE_TAG} 1 {_BYTE}"

    return _framed(process, lines())


def _exchanges(
    rank: int, rounds: Iterable[schedules.Round], ranks: int, add_s_per_byte: float
) -> Iterator[str]:
    if ranks == 1:
        return
    for one in rounds:
        yield f"{rank} isend {one.to} {_DATA_TAG} {one.sent_bytes} {_BYTE}"
        yield f"{rank} irecv {one.source} {_DATA_TAG} {one.received_bytes} {_BYTE}"
        yield f"{rank} waitall"
        yield from _computed(rank, one.added_bytes * add_s_per_byte)


def _computed(process: int, seconds: float) -> Iterator[str]:
    flops = round(seconds * FLOP_RATE)
    if flops > 0:
        yield f"{process} compute {flops}"
