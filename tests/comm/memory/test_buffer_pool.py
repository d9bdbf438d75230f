"""Blocks return to the pool when, and only when, nothing refers to them."""

from __future__ import annotations

import gc
import pickle

import numpy as np
import pytest
import torch

from mpidist.comm.memory.buffer_pool import BufferPool, block_bytes

MANY = 100_000


def address(view):
    return np.frombuffer(view, np.uint8).__array_interface__["data"][0]


def unpickled(view):
    """Return an array made from a buffer, as messages are."""
    return pickle.loads(
        pickle.dumps(np.zeros(MANY, np.uint8), 5, buffer_callback=lambda buffer: None),
        buffers=[view],
    )


@pytest.mark.parametrize(
    "use",
    [
        lambda view: torch.frombuffer(view, dtype=torch.uint8)[5:],
        lambda view: torch.frombuffer(view, dtype=torch.float32).view(-1, 5)[1],
        lambda view: np.frombuffer(view, np.float32)[3:][::2],
        lambda view: unpickled(view)[10:].reshape(-1, 2)[1],
        lambda view: view[8:][4:],
        lambda view: torch.from_numpy(np.frombuffer(view, np.uint8)[7:]),
    ],
)
def test_views_of_views_keep_a_block(use):
    memory = BufferPool()
    view = memory.acquire(MANY)
    place = address(view)
    user = use(view)
    del view
    gc.collect()
    assert address(memory.acquire(MANY)) != place  # still in use
    del user
    gc.collect()
    places = [memory.acquire(MANY) for _ in range(2)]
    assert place in [address(other) for other in places]


def test_idle_memory_has_a_limit():
    memory = BufferPool(kept_bytes=300_000)
    views = [memory.acquire(MANY) for _ in range(10)]
    assert len({address(view) for view in views}) == 10
    del views
    gc.collect()
    assert memory._idle_bytes <= 300_000


def test_a_block_is_at_most_half_larger_than_its_memory():
    for nbytes in range(1, 5000, 7):
        assert nbytes <= block_bytes(nbytes) <= max(1.5 * nbytes, 2)
    assert memory_of(0) == 0 and memory_of(5) == 5 and memory_of(MANY) == MANY


def memory_of(nbytes):
    return BufferPool().acquire(nbytes).nbytes
