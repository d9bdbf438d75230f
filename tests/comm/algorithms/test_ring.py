"""Ring all-reduce of device memory: long messages, and sums in place."""

from __future__ import annotations

import pytest
import torch

from mpidist.comm import AVG, MAX, SUM
from mpidist.comm.algorithms import (
    ring,
)
from mpidist.comm.memory.fence import StreamFence
from tests.comm.places import Lazy, contribution
from tests.tools.support import agree, reduced

pytestmark = pytest.mark.mpi


def test_long_messages_around_the_ring(monkeypatch, group):
    """Messages past MPI's eager limit, in several chunks."""
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "1")
    monkeypatch.setattr(ring, "CHUNK_BYTES", 400_000)
    place = Lazy(monkeypatch, 4)
    for dtype in (torch.float32, torch.bfloat16):
        tensor = place.produce((torch.arange(900_000) % 100 + group.rank).to(dtype))
        group.all_reduce(tensor, async_op=True).wait()
        wanted = (
            (torch.arange(900_000) % 100) * group.size + group.size * (group.size - 1) // 2
        ).to(dtype)
        agree(group, torch.equal(place.consume(tensor.clone), wanted), str(dtype))


def test_a_plain_sum_is_computed_in_place(monkeypatch, group):
    """Shards are sent from their own memory; a copy would cost a launch and a pass over it."""
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "1")
    for name in ("_scaled_copy", "_finish"):
        monkeypatch.setattr(ring, name, None)
    place = Lazy(monkeypatch, 5)
    for dtype, op in [(torch.float32, SUM), (torch.float64, AVG), (torch.int32, MAX)]:
        parts = [contribution(rank, 5000, dtype) for rank in range(group.size)]
        tensor = place.produce(parts[group.rank])
        fence = StreamFence(place.device, (tensor,))
        fence.wait_ready()
        ring.all_reduce(group._comm, fence, tensor, op, 900)
        for event in fence.record():
            event.block_current_stream()
        agree(group, torch.equal(place.consume(tensor.clone), reduced(parts, op)), f"{dtype} {op}")
