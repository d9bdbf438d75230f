"""Measurement of the int8 wire's segments, for tuning tables.

A long segment costs the host one collective and a few launches; short ones hide the arithmetic
behind the transfer. The network and the device decide between them.

Letters: W ranks of the group; N elements of the flat buffer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from mpidist.comm.algorithms import tuning
from mpidist.comm.group_types import Group
from mpidist.zero.wire.int8 import Int8Wire

# Elements of the segments that are measured.
SEGMENTS = (1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
_DTYPE = torch.float32


def segments_for(shard_numel: int) -> tuple[int, ...]:
    """Return the ``SEGMENTS`` that differ for a shard: one of those that hold it whole."""
    shorter = sum(segment < shard_numel for segment in SEGMENTS)
    return SEGMENTS[: shorter + 1]


def measured_segments(
    group: Group,
    device: torch.device,
    sizes: Sequence[int],
    rounds: int,
    log: Callable[[str], object] = lambda line: None,
) -> list[tuple[int, int]]:
    """Time shares of flat buffers; return the fastest segment for each shard that has a choice.

    Collective: over the group, with the same arguments on all ranks.

    Args:
        group: The group.
        device: Of the buffers.
        sizes: Bytes of a flat float32 buffer.
        rounds: Shares by each segment, in turn, after a warm-up.
        log: Called with a line of text for each size that has a choice.

    Returns:
        (elements of a shard, elements of a segment); none for one rank, which sends nothing.
    """
    # Two sizes may have shards of one length.
    shards = sorted({-(-size // _DTYPE.itemsize // group.size) for size in sizes})
    found = []
    for shard_numel in shards:
        segments = segments_for(shard_numel)
        if group.size == 1 or len(segments) == 1:
            continue
        times = _seconds(group, device, shard_numel, segments, rounds)
        entries = [f"{segment}: {1e6 * s:.0f} us" for segment, s in times.items()]
        log(tuning.line_of(f"int8 wire, shards of {shard_numel} elements", entries))
        found.append((shard_numel, min(times, key=times.__getitem__)))
    return found


def _seconds(
    group: Group, device: torch.device, shard_numel: int, segments: Sequence[int], rounds: int
) -> dict[int, float]:
    """Return the medians of the slowest rank's seconds, by segment; the same on all ranks."""
    flat = torch.zeros(group.size * shard_numel, dtype=_DTYPE, device=device)
    # Never equal to the visible shard, so each share has a change.
    master = torch.rand(shard_numel, dtype=_DTYPE, device=device)
    bounds = [rank * shard_numel for rank in range(group.size + 1)]
    calls = {
        segment: partial(Int8Wire(segment).share, group, master, flat, bounds)
        for segment in segments
    }
    times: dict[int, list[float]] = {segment: [] for segment in segments}
    for turn in range(rounds + 1):
        for segment, call in calls.items():
            flat.zero_()
            elapsed_s = _once(group, device, call)
            if turn:
                times[segment].append(elapsed_s)
    return {segment: median(taken) for segment, taken in times.items()}


def _once(group: Group, device: torch.device, call: Callable[[], object]) -> float:
    _synchronize(device)
    group.barrier()
    start = time.perf_counter()
    call()
    _synchronize(device)
    slowest_s = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    group.all_reduce(slowest_s, "max")
    return float(slowest_s)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
