"""Bucket plans against published cases, and against torch's function over random inputs."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import _compute_bucket_assignment_by_size as torch_assignment

from mpidist.ddp.buckets.plan import (
    assign,
    by_place,
    compute_bucket_assignment_by_size,
    limits_of,
    merge,
    size_bytes,
)

MIB = 1 << 20
F, D = torch.float32, torch.float64


def tensors_of(*kinds):
    return [torch.empty(numel, dtype=dtype) for dtype, numel in kinds]


@pytest.mark.parametrize(
    ("kinds", "limits", "buckets"),
    [
        ([(F, 100), (F, 200), (F, 100), (F, 50)], [400], [[0], [1], [2], [3]]),
        ([(F, 50), (D, 25), (F, 50), (D, 25), (F, 50), (D, 25)], [400], [[0, 2], [1, 3], [4], [5]]),
        ([(F, 10), (F, 10), (F, 10), (F, 10)], [40, 80], [[0], [1, 2], [3]]),
        (
            [(F, 50), (D, 25), (F, 50), (D, 25), (F, 50), (D, 25)],
            [200, 400],
            [[0], [1], [2, 4], [3, 5]],
        ),
    ],
)
def test_torchs_published_cases_have_their_buckets(kinds, limits, buckets):
    assert compute_bucket_assignment_by_size(tensors_of(*kinds), limits) == buckets


KINDS = st.lists(
    st.tuples(st.sampled_from([F, D, torch.float16]), st.integers(0, 60)), min_size=1, max_size=30
)
LIMITS = st.lists(st.integers(1, 400), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(KINDS, LIMITS)
def test_equal_to_torchs_own(kinds, limits):
    tensors = tensors_of(*kinds)
    buckets = assign(tensors, limits)
    theirs, _ = torch_assignment(tensors, limits)
    assert list(map(list, buckets)) == theirs


@settings(max_examples=150, deadline=None)
@given(KINDS, LIMITS, st.randoms())
def test_equal_to_torchs_own_in_a_given_order(kinds, limits, random):
    tensors = tensors_of(*kinds)
    order = list(range(len(tensors)))
    random.shuffle(order)
    ours = compute_bucket_assignment_by_size(tensors, limits, order)
    theirs, at = torch_assignment([tensors[place] for place in order], limits, [], order)
    closed = sum(size_bytes(tensors, b) >= limit for b, limit in zip(theirs, at, strict=True))
    assert ours[:closed] == theirs[:closed]
    # torch keeps the remaining buckets in a hash table, in any order.
    assert sorted(ours[closed:]) == sorted(theirs[closed:])


@settings(max_examples=300, deadline=None)
@given(KINDS, LIMITS, st.integers(1, 6))
def test_merged_buckets_hold_the_same_tensors_of_one_kind(kinds, limits, most):
    tensors = tensors_of(*kinds)
    buckets = assign(tensors, limits)
    merged = merge(tensors, buckets, most)
    assert [place for b in merged for place in b] == [place for b in buckets for place in b]
    assert all(len({tensors[place].dtype for place in b}) == 1 for b in merged)
    neighbours = [(tensors[a[0]].dtype, tensors[b[0]].dtype) for a, b in pairwise(merged)]
    assert len(merged) <= max(most, 1) or all(left != right for left, right in neighbours)


def test_the_smallest_neighbours_are_merged_first():
    tensors = tensors_of((F, 10), (F, 1), (F, 2), (F, 10))
    buckets = [(place,) for place in range(4)]
    assert [b for b in merge(tensors, buckets, 3)] == [(0,), (1, 2), (3,)]
    assert [b for b in merge(tensors, buckets, 1)] == [(0, 1, 2, 3)]


def test_limits_in_bytes_follow_the_caps_in_mib():
    assert limits_of() == (MIB, 25 * MIB)
    assert limits_of(2) == (2 * MIB,)
    assert limits_of(0.5) == (MIB // 2,)
    assert limits_of(7, [1, 3]) == (MIB, 3 * MIB)
    assert limits_of(first_bucket_bytes=26 * MIB) == (25 * MIB,)


@pytest.mark.parametrize("call", [lambda: limits_of(0), lambda: limits_of(None, [1, -2])])
def test_caps_that_are_not_positive_are_refused(call):
    with pytest.raises(ValueError, match="must be positive"):
        call()


def test_plans_without_tensors_or_limits_are_refused():
    with pytest.raises(ValueError, match="no tensor"):
        assign([], [1])
    with pytest.raises(ValueError, match="at least one limit"):
        assign(tensors_of((F, 1)), [])
    with pytest.raises(ValueError, match="all of them positive"):
        assign(tensors_of((F, 1)), [4, 0])
    with pytest.raises(ValueError, match="at least 1"):
        merge(tensors_of((F, 1)), assign(tensors_of((F, 1)), [1]), 0)


def test_sparse_tensors_have_the_size_of_their_dense_form():
    tensors = [torch.eye(3).to_sparse(), torch.ones(3)]
    assert compute_bucket_assignment_by_size(tensors, [10]) == [[0], [1]]


@settings(max_examples=150, deadline=None)
@given(KINDS, LIMITS, st.randoms())
def test_sparse_gradients_have_buckets_of_their_own_as_torch_plans_them(kinds, limits, random):
    tensors = tensors_of(*kinds)
    sparse = [random.random() < 0.3 for _ in tensors]
    order = list(range(len(tensors)))
    theirs, _ = torch_assignment(tensors, limits, sparse)
    assert list(map(list, assign(tensors, limits, None, sparse))) == theirs
    random.shuffle(order)
    ours = assign(tensors, limits, order, sparse)
    theirs, _ = torch_assignment([tensors[place] for place in order], limits, sparse, order)
    assert sorted(list(b) for b in ours) == sorted(theirs)
    for few in (merge(tensors, ours, 1, sparse), ours):
        assert sorted(b[0] for b in few if sparse[b[0]]) == [
            i for i, one in enumerate(sparse) if one
        ]
        assert all(len(b) == 1 for b in few if any(sparse[place] for place in b))


def test_a_plan_of_names_holds_each_once():
    assert by_place([["b"], ["c", "a"]], "abc") == [(1,), (2, 0)]
    for plan, wrong in (([["a", "b"], ["b"]], "b"), ([["a"]], "b"), ([["a", "b", "x"]], "x")):
        with pytest.raises(ValueError, match=f"once; look at {wrong}$"):
            by_place(plan, "ab")
