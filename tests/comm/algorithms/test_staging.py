"""Staging of device memory through pinned host memory."""

from __future__ import annotations

import pytest
import torch

from mpidist.comm.algorithms import (
    host_copies,
    staging,
)
from tests.comm.places import Lazy
from tests.tools.support import agree

pytestmark = pytest.mark.mpi


def test_pinned_memory_is_bounded(monkeypatch, group):
    """Staged operations and messages: torch would keep pinned memory of each size for ever."""
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "0")
    monkeypatch.setattr(host_copies, "PINNED_BYTES", 1 << 12)
    monkeypatch.setattr(staging, "CHUNK_BYTES", 1 << 10)
    place = Lazy(monkeypatch, 5)
    pinned, real = [], place.device.staging
    monkeypatch.setattr(
        place.device,
        "staging",
        lambda numel, dtype: pinned.append(numel * dtype.itemsize) or real(numel, dtype),
    )
    mine = torch.arange(5000.0) + group.rank
    left, right = (group.rank - 1) % group.size, (group.rank + 1) % group.size

    outputs = [place.blank(mine) for _ in range(group.size)]
    group.all_gather(outputs, place.produce(mine))
    target = place.blank(mine)
    receive = group.irecv(target, left)
    group.isend(place.produce(mine), right).wait()
    receive.wait()
    strided = place.produce(torch.arange(15_000.0).view(3, 5000))
    group.reduce(strided.t(), 0)

    got = place.consume(
        lambda: [target.clone(), strided.clone(), *(output.clone() for output in outputs)]
    )
    ok = torch.equal(got[0], torch.arange(5000.0) + left)
    ok &= torch.equal(
        got[1], torch.arange(15_000.0).view(3, 5000) * (group.size if group.rank == 0 else 1)
    )
    ok &= all(
        torch.equal(values, torch.arange(5000.0) + rank) for rank, values in enumerate(got[2:])
    )
    agree(group, ok, f"{got}")
    agree(group, pinned and max(pinned) <= 1 << 12, f"{pinned}")
