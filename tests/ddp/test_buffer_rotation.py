"""Buckets have a buffer one after the other, in the order in which they leave; those with their own never wait."""

import pytest
import torch

from mpidist.ddp.buffer_rotation import TurnMemory, Turns


def test_a_buffer_goes_from_bucket_to_bucket():
    turns = Turns([0, 1, None, 0, 1, 0], [0, 1, 2, 3, 5])  # bucket 4 does not leave
    assert [turns.is_open(index) for index in range(6)] == [True, True, True, False, False, False]
    assert [turns.holder(index) for index in (0, 1, 2, 3, 5)] == [None, None, None, 0, 0]
    turns.pass_on(2)
    turns.pass_on(0)
    assert turns.is_open(3) and not turns.is_open(5) and turns.holder(5) == 3
    turns.pass_on(1)
    assert not turns.is_open(4) and turns.holder(3) is None
    turns.pass_on(3)
    assert turns.is_open(5)
    with pytest.raises(AssertionError):
        turns.pass_on(3)


def test_buffers_are_of_the_biggest_buckets_size():
    memory = TurnMemory(None, torch.device("cpu"), [64, 192, 128], 2, shares=False)
    assert memory.count == 2
    node, first = memory.take(0, 24, torch.float64)
    again, other = memory.take(0, 3, torch.int16)[1], memory.take(1, 0, torch.float32)[1]
    assert node is None and first.dtype is torch.float64 and first.untyped_storage().nbytes() == 192
    assert first.data_ptr() == again.data_ptr() and again.shape == (3,) and other.numel() == 0
    assert TurnMemory(None, torch.device("cpu"), [64], 5, shares=False).count == 1
