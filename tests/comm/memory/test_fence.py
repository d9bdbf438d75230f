"""Stream dependencies of operations on device memory, on the lazy device."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mpidist.comm import AVG, MAX, SUM, PremulSum
from mpidist.comm.algorithms import (
    device_collectives,
)
from mpidist.comm.memory.fence import StreamFence
from tests.comm.places import Lazy
from tests.tools.support import agree

pytestmark = pytest.mark.mpi


def test_memory_is_kept_until_the_last_copy(monkeypatch, group):
    """torch's allocator must not reuse the memory before the copies to it are complete."""
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "0")
    place = Lazy(monkeypatch, None)
    tensor, gathered = place.produce(torch.ones(500)), place.blank(torch.ones(500 * group.size))
    # With a factor, because on one rank a sum leaves the tensor unchanged.
    reduce = partial(group.all_reduce, tensor, PremulSum(2.0), async_op=True)
    for call in (reduce, partial(group.all_gather_into_tensor, gathered, tensor, async_op=True)):
        call().wait()
        for stream in (place.device.down, place.device.up):
            agree(
                group,
                stream.kept.get(tensor.data_ptr(), -1) == len(stream.queue),
                "the tensor is let go too early",
            )
    agree(group, place.device.up.kept.get(gathered.data_ptr(), -1) == len(place.device.up.queue))


def test_a_single_rank_makes_no_fence_and_copies_nothing(monkeypatch, world):
    """No event, no wait and no copy; a wait for an asynchronous call still waits for its tensor."""
    place, made = Lazy(monkeypatch, None), []
    fence = device_collectives.StreamFence
    monkeypatch.setattr(
        device_collectives, "StreamFence", lambda *args: (made.append(args), fence(*args))[1]
    )
    alone = world.split(world.rank)
    tensors = [place.produce(torch.full((300,), 3.0)), place.produce(torch.full((5,), 3.0))]
    count = sum(len(stream.queue) for stream in place.device.streams)
    for op in (SUM, AVG, MAX):
        alone.all_reduce(tensors[0], op)
        alone.all_reduce_coalesced(tensors, op)
    alone.reduce(tensors[0], 0)
    alone.broadcast(tensors[0], 0)
    agree(
        world,
        not made and count == sum(len(stream.queue) for stream in place.device.streams),
        f"{len(made)} orders",
    )
    work = alone.all_reduce(tensors[0], async_op=True)
    place.device.leave_default_stream()  # to a stream without the tensor's work
    work.wait()
    agree(
        world,
        not made and bool((place.consume(tensors[0].clone) == 3).all()),
        f"{len(made)} orders",
    )
    alone.all_reduce(tensors[0], PremulSum(2.0))
    agree(world, len(made) == 1 and bool((place.consume(tensors[0].clone) == 6).all()))
    alone.close()


def test_a_single_rank_keeps_the_order_of_its_asynchronous_calls(monkeypatch, world):
    """As on several ranks, a wait for the last call covers the copies of earlier calls."""
    place = Lazy(monkeypatch, None)
    alone = world.split(world.rank)
    gathered = place.blank(torch.ones(300))
    first = alone.all_gather_into_tensor(
        gathered, place.produce(torch.full((300,), 3.0)), async_op=True
    )
    alone.all_reduce(gathered, async_op=True).wait()
    agree(world, bool((place.consume(gathered.clone) == 3).all()), f"{gathered}")
    first.wait()
    alone.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("forgotten", ["wait_ready", "record"])
def test_a_missing_wait_gives_wrong_numbers_on_the_lazy_device(monkeypatch, world, forgotten):
    # A test of the lazy device: without a wait of the library, results are wrong.
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "0")
    place = Lazy(monkeypatch, None)
    group = world.clone("forgetful")
    monkeypatch.setattr(StreamFence, forgotten, lambda fence: [])
    tensor = place.produce(torch.ones(100))
    group.all_reduce(tensor)
    got = place.consume(tensor.clone)
    group.close()
    agree(world, not bool((got == world.size).all()), str(got))
