"""A bucket takes gradients in and hands their averages back, as views or as copies."""

import pytest
import torch

from mpidist.ddp.buckets.bucket import Bucket

NAMES = ["a", "b", "c"]
ALL = [True] * 3


def bucket_of(shapes=((2, 3), (4,), (5,)), places=(2, 0)):
    """Return parameters with the gradients 1, 2, …, and the bucket of those at some places."""
    parameters = [torch.zeros(shape, requires_grad=True) for shape in shapes]
    for number, parameter in enumerate(parameters, 1):
        parameter.grad = torch.full_like(parameter, float(number))
    return parameters, Bucket(places, parameters, NAMES)


@pytest.mark.parametrize("as_views", [True, False])
def test_gradients_come_in_and_averages_go_back(as_views):
    parameters, bucket = bucket_of()
    assert bucket.names == ("c", "a") and bucket.forms == (((5,), (1,)), ((2, 3), (3, 1)))
    bucket.begin_pass()
    assert bucket.copy_in(2, parameters[2], as_views)
    assert bucket.collect(as_views) == []
    assert bucket.flat.tolist() == [3.0] * 5 + [1.0] * 6
    assert bucket.copied == (set() if as_views else {0, 2})
    bucket.accept(torch.full((11,), 8.0), 0.5)
    bucket.hand_back(ALL, as_views)
    assert parameters[0].grad.eq(4).all() and parameters[2].grad.eq(4).all()
    assert (parameters[0].grad is bucket.view_of[0]) is as_views
    assert parameters[1].grad.eq(2).all()


def test_a_missing_gradient_is_zero_and_stays_missing_unless_a_rank_has_one():
    parameters, bucket = bucket_of()
    bucket.flat.fill_(7)
    parameters[0].grad = None
    bucket.collect(as_views=False)
    assert bucket.view_of[0].eq(0).all() and bucket.view_of[2].eq(3).all()
    bucket.hand_back([False, False, True], as_views=False)
    assert parameters[0].grad is None
    bucket.hand_back(ALL, as_views=False)
    assert parameters[0].grad.eq(0).all() and parameters[0].grad is not bucket.view_of[0]


def test_views_have_the_strides_of_their_parameters():
    turned = torch.zeros(3, 2).t().requires_grad_()
    bucket = Bucket([0], [turned], NAMES)
    assert bucket.views[0].stride() == (1, 2) and bucket.views[0].shape == (2, 3)
    turned.grad = torch.arange(6.0).view(3, 2).t()
    bucket.attach_gradients()
    assert turned.grad is bucket.views[0] and bucket.flat.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_gradient_of_another_layout_is_refused_by_name():
    parameters, bucket = bucket_of(places=(0,))
    parameters[0].grad = parameters[0].grad.to_sparse()
    assert bucket.collect(as_views=True) == [("a", torch.sparse_coo)]
    assert bucket.flat.eq(0).all()
