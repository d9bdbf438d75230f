"""Rotation of buffers among buckets in launch order."""

import pytest
import torch

from mpidist.ddp.buckets.buffers import BufferRotation, RotatingBuffers


def test_a_buffer_goes_from_bucket_to_bucket():
    rotation = BufferRotation([0, 1, None, 0, 1, 0], [0, 1, 2, 3, 5])  # bucket 4 is skipped
    assert [rotation.is_current(index) for index in range(6)] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]
    assert [rotation.holder(index) for index in (0, 1, 2, 3, 5)] == [None, None, None, 0, 0]
    rotation.release(2)
    rotation.release(0)
    assert rotation.is_current(3) and not rotation.is_current(5) and rotation.holder(5) == 3
    rotation.release(1)
    assert not rotation.is_current(4) and rotation.holder(3) is None
    rotation.release(3)
    assert rotation.is_current(5)
    with pytest.raises(AssertionError):
        rotation.release(3)


def test_buffers_are_of_the_biggest_buckets_size():
    memory = RotatingBuffers(None, torch.device("cpu"), [64, 192, 128], 2, shares=False)
    assert memory.count == 2
    node, first = memory.tensor(0, 24, torch.float64)
    again, other = memory.tensor(0, 3, torch.int16)[1], memory.tensor(1, 0, torch.float32)[1]
    assert node is None and first.dtype is torch.float64 and first.untyped_storage().nbytes() == 192
    assert first.data_ptr() == again.data_ptr() and again.shape == (3,) and other.numel() == 0
    assert RotatingBuffers(None, torch.device("cpu"), [64], 5, shares=False).count == 1
