"""The argument of hooks: a buffer that a hook may replace, and gradients in it."""

import pytest
import torch

from mpidist.ddp.buckets.bucket import Bucket
from mpidist.ddp.hooks.grad_bucket import GradBucket


def made():
    parameters = [torch.zeros(2, 3), torch.zeros(3, 2).t(), torch.zeros(4)]
    return parameters, Bucket([2, 1], parameters, ["a", "b", "c"], flat=torch.arange(10.0))


def test_a_bucket_shows_its_place_names_and_parameters():
    parameters, held = made()
    bucket = GradBucket(held, 3, True)
    assert (bucket.index(), bucket.is_last()) == (3, True)
    assert bucket.names() == ("c", "b") and bucket.group() is None
    assert not bucket.takes_turns() and bucket.node_tensor() is None
    c, b = bucket.parameters()
    assert c is parameters[2] and b is parameters[1]
    assert bucket.forms() == (((4,), (1,)), ((2, 3), (1, 2)))


def test_gradients_are_views_of_the_buffer_also_of_one_that_took_its_place():
    _, held = made()
    bucket = GradBucket(held, 0, False)
    first, second = bucket.gradients()
    assert first.tolist() == [0, 1, 2, 3] and second.tolist() == [[4, 6, 8], [5, 7, 9]]
    bucket.set_buffer(bucket.buffer() + 10)
    first, second = bucket.gradients()
    assert first.tolist() == [10, 11, 12, 13] and second.tolist() == [[14, 16, 18], [15, 17, 19]]
    second.zero_()
    assert bucket.buffer()[4:].eq(0).all() and held.flat[4:].ne(0).all()


def test_a_buffer_of_another_size_is_refused():
    _, held = made()
    with pytest.raises(ValueError, match="a tensor of 10 elements for bucket 2; got shape"):
        GradBucket(held, 2, False).set_buffer(torch.zeros(9))
