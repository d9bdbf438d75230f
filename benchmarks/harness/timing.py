"""Timed bursts of calls, with contenders in turns, and their statistics.

A burst is consecutive calls, long enough for the clock; all ranks start a burst together. In each
round every contender runs one burst, and the order rotates from round to round, so that
disturbances of the machine affect all contenders alike.
"""

from __future__ import annotations

import functools
import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch

TOUCHED_BYTES = 1 << 30
_LONGEST_BURST = 1_000_000  # passes


@dataclass(frozen=True)
class Contender:
    """One implementation of an operation."""

    name: str
    # This rank's calls, which make one pass in sequence.
    calls: tuple[Callable[[], object], ...]
    # Tensors with the results.
    outputs: tuple[torch.Tensor, ...]


# (communicator, contender, passes) to seconds
RunBurst = Callable[[Any, Contender, int], float]


@dataclass(frozen=True)
class Series:
    """One contender's times, in microseconds per call."""

    name: str
    passes_per_burst: int
    calls_per_pass: int
    # Time of the slowest rank in each round.
    rounds_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        return float(np.median(self.rounds_us))

    def percentile_us(self, percent: float) -> float:
        return float(np.percentile(self.rounds_us, percent))


@dataclass(frozen=True)
class Comparison:
    """``left`` relative to ``right``: ratio and difference, as median of rounds and of medians."""

    left: str
    right: str
    ratio_of_rounds: float
    ratio_of_medians: float
    difference_of_rounds_us: float
    difference_of_medians_us: float


def compare(left: Series, right: Series) -> Comparison:
    ours, theirs = np.array(left.rounds_us), np.array(right.rounds_us)
    return Comparison(
        left.name,
        right.name,
        float(np.median(ours / theirs)),
        left.median_us / right.median_us,
        float(np.median(ours - theirs)),
        left.median_us - right.median_us,
    )


@functools.cache
def touch_memory() -> None:
    """Touch and free memory once a process, so that no contender pays for the first touch of pages.

    On a virtual machine the first touch is expensive.
    """
    torch.empty(TOUCHED_BYTES, dtype=torch.uint8).fill_(1)


def time_rounds(
    comm: Any,
    contenders: Sequence[Contender],
    rounds: int,
    burst_s: float,
    run_burst: RunBurst | None = None,
) -> list[Series]:
    """Warm up, size the bursts, and time ``rounds`` rounds.

    Collective: over ``comm``, an mpi4py communicator.

    Args:
        run_burst: Runs passes of a contender and returns the seconds; the host's clock if None.
    """
    run = run_burst or burst
    passes = [_size_burst(comm, contender, burst_s, run) for contender in contenders]
    elapsed_s = np.zeros((len(contenders), rounds))
    gc.collect()
    gc.disable()
    try:
        for round_number in range(rounds):
            for place in _order(len(contenders), round_number):
                elapsed_s[place, round_number] = run(comm, contenders[place], passes[place])
    finally:
        gc.enable()
    # The slowest rank counts. A rank may have no calls in a pass: ping-pong involves two ranks.
    slowest_s = np.max(comm.allgather(elapsed_s), axis=0)
    calls = np.max(
        comm.allgather([len(contender.calls) for contender in contenders]), axis=0
    ).tolist()
    return [
        Series(contender.name, n, k, tuple((1e6 * times_s / (n * k)).tolist()))
        for contender, n, k, times_s in zip(contenders, passes, calls, slowest_s, strict=True)
    ]


def _order(count: int, round_number: int) -> list[int]:
    first = round_number % count
    return [*range(first, count), *range(first)]


def burst(comm: Any, contender: Contender, passes: int) -> float:
    """Run passes that all ranks begin together; return this rank's seconds."""
    calls = contender.calls
    comm.Barrier()
    start = time.perf_counter()
    if len(calls) == 1:
        (call,) = calls
        for _ in repeat(None, passes):
            call()
    else:
        for _ in repeat(None, passes):
            for call in calls:
                call()
    return time.perf_counter() - start


def _size_burst(comm: Any, contender: Contender, burst_s: float, run: RunBurst) -> int:
    """Return the passes in which the slowest rank works for ``burst_s``; also the warm-up."""
    run(comm, contender, 2)
    passes = 1
    while True:
        elapsed_s = max(comm.allgather(run(comm, contender, passes)))
        if elapsed_s >= burst_s or passes == _LONGEST_BURST:
            return passes
        wanted = math.ceil(1.1 * passes * burst_s / elapsed_s)
        passes = min(max(wanted, passes + 1), 10 * passes, _LONGEST_BURST)
