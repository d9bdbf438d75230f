"""MPI requests on device memory: the device is current in the thread of each MPI call."""

from __future__ import annotations

import time

import pytest
import torch

from mpidist.comm.discovery import trial_operations
from tests.comm.lazy_device import WatchedComm
from tests.comm.places import Lazy
from tests.tools.support import agree, finished

pytestmark = pytest.mark.mpi


def watched(monkeypatch, group, device, watches_results):
    """Record the group's MPI calls, and whether the device was current in the calling thread."""
    seen = []
    watch = WatchedComm(group._state.mpi, device, seen, watches_results)
    for owner, name in [
        (group._state, "mpi"),
        (group._comm, "mpi"),
        (group._comm, "plain"),
        (group._messages.receives, "_mpi"),
    ]:
        monkeypatch.setattr(owner, name, watch)
    return seen


def test_mpi_works_on_device_memory_with_that_device_current(monkeypatch, group):
    """In the caller's thread and in the group's: MPI uses the calling thread's CUDA context."""
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "1")
    place = Lazy(monkeypatch, None)
    group._comm.device_operations["cpu"] = frozenset(trial_operations.OPERATIONS)
    with pytest.MonkeyPatch.context() as patches:
        seen = watched(patches, group, place.device, watches_results=False)
        for async_op in (False, True):
            works = [
                group.all_reduce(place.produce(torch.ones(5)), async_op=async_op),
                group.all_reduce(place.produce(torch.ones(100_000)), async_op=async_op),
                group.broadcast(place.produce(torch.ones(5)), 0, async_op=async_op),
                group.all_gather_into_tensor(
                    place.blank(torch.ones(5 * group.size)), place.produce(torch.ones(5)), async_op
                ),
            ]
            for work in works:
                finished(work)
    agree(group, all(is_current for _, is_current in seen) and (group.size == 1 or seen), f"{seen}")
    agree(group, not place.device.is_current(), "the device stays current")


@pytest.mark.parametrize("by", ["the owner", "another thread"])
def test_messages_of_device_memory_are_tested_with_that_device_current(monkeypatch, group, by):
    """In any thread that matches a receive or tests a request: its owner's, or posted receives'."""
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "1")
    place = Lazy(monkeypatch, None)
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    target = place.blank(torch.ones(300))
    is_matched = True
    with pytest.MonkeyPatch.context() as patches:
        seen = watched(patches, group, place.device, watches_results=True)
        receive = group.irecv(target, left)
        send = group.isend(place.produce(torch.full((300,), 3.0)), right)
        if by == "another thread":
            queue, deadline = group._messages.receives, time.monotonic() + 30
            while not queue.is_empty() and time.monotonic() < deadline:
                time.sleep(1e-3)
            is_matched = queue.is_empty()
        send.wait()
        receive.wait()
    agree(group, is_matched, "no other thread matches the receive")
    agree(group, {"Isend", "Irecv", "Test"} <= {name for name, _ in seen}, f"{seen}")
    agree(group, all(is_current for _, is_current in seen), f"{seen}")
    agree(group, bool((place.consume(target.clone) == 3).all()), "the message")
