"""Evaluation of data-parallel training: means over ranks, accuracy, exposed communication."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def mean_over_ranks(group: Any, total: float, count: int) -> float:
    """Divide the sum over ranks of ``total`` by that of ``count``."""
    sums = torch.tensor([total, count], dtype=torch.float64)
    group.all_reduce(sums)
    return (sums[0] / sums[1]).item()


@torch.no_grad()
def accuracy(group: Any, net: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of correct answers; each rank evaluates every size-th image."""
    own = slice(group.rank, None, group.size)
    net.eval()
    right = (net(images[own]).argmax(1) == labels[own]).sum().item()
    return mean_over_ranks(group, right, len(labels[own]))


def exposed_ms(
    group: Any, model: Any, images: torch.Tensor, labels: torch.Tensor, rounds: int = 50
) -> float:
    """Return the time of a step's forward and backward pass that communication adds.

    This is the time of a step minus the time of the same step under ``no_sync``, the median of so
    many rounds, measured in turns.
    The result includes waiting (also for a slower rank) and compression, but no overlapped
    communication. No optimizer steps, so the weights stay unchanged.
    """

    def step_s(sync: bool) -> float:
        model.zero_grad()
        group.barrier()
        start = time.perf_counter()
        with contextlib.nullcontext() if sync else model.no_sync():
            F.cross_entropy(model(images), labels).backward()
        return time.perf_counter() - start

    warm_up = rounds // 5
    pairs = [(step_s(True), step_s(False)) for _ in range(warm_up + rounds)][warm_up:]
    with_sync, without = torch.tensor(pairs).median(0).values.tolist()
    return mean_over_ranks(group, 1e3 * (with_sync - without), 1)
