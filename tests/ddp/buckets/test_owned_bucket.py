"""A bucket reduced to owners frees gradients and hands this rank's elements back."""

import torch

from mpidist.ddp.buckets.accumulated_averages import AccumulatedAverages
from mpidist.ddp.buckets.owned_bucket import OwnedBucket, Owners

# Of four elements rank 0 owns the first two; all ranks get the average of the other parameter.
BOUNDS = {0: ((0, 0, 2), (1, 2, 4))}


def made(rank, kept):
    parameters = [torch.zeros(numel, requires_grad=True) for numel in (4, 3)]
    averages = AccumulatedAverages(parameters, BOUNDS, 2, lambda: True)
    owners = Owners(BOUNDS, 1, rank, averages, kept)
    return parameters, OwnedBucket([1, 0], parameters, ["a", "b"], None, torch.zeros(7), 0, owners)


def reduced(parameters, bucket, values):
    """Run a pass whose gradients are ``values`` and whose average is what the bucket then holds."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.full_like(parameter, value)
    bucket.begin_pass()
    bucket.attach_gradients()
    assert bucket.collect(as_views=True) == []
    assert all(parameter.grad is None for parameter in parameters)
    bucket.copy_owned()
    bucket.flat.fill_(-1)  # by the next bucket, which uses the buffer
    bucket.hand_back([True, True], as_views=True)


def test_each_rank_gets_the_elements_that_it_owns():
    for rank, own in ((0, [2, 2, 0, 0]), (1, [0, 0, 2, 2])):
        parameters, bucket = made(rank, {})
        reduced(parameters, bucket, (2.0, 5.0))
        assert parameters[0].grad.tolist() == own
        assert parameters[1].grad.tolist() == [5, 5, 5]


def test_memory_of_the_averages_is_kept_between_passes_if_asked():
    for kept, is_same in (({}, True), (None, False)):
        parameters, bucket = made(0, kept)
        reduced(parameters, bucket, (2.0, 5.0))
        first = parameters[0].grad
        reduced(parameters, bucket, (3.0, 5.0))
        assert (parameters[0].grad is first) is is_same
        assert parameters[0].grad.tolist() == [3, 3, 0, 0]


def test_an_average_that_one_rank_holds_counts_for_all_ranks_in_the_next_pass():
    parameters, bucket = made(0, {})
    reduced(parameters, bucket, (2.0, 5.0))
    bucket.begin_pass()
    bucket.collect(as_views=True)
    assert bucket.view_of[0].tolist() == [4, 4, 0, 0]
    # The other parameter's average is on all ranks.
    assert bucket.view_of[1].tolist() == [5, 5, 5]
