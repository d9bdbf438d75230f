"""Bounds as ranges of a bucket, and bounds that are refused."""

import itertools
import random

import pytest
import torch

from mpidist.ddp.buckets.ownership import Ownership, bounds_by_place, ownership_of, split


def parameters():
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in [(2, 3), (), (0,), (5,)]]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_element_of_a_bucket_has_its_owner(size):
    """Compare with a twin that has one owner per element."""
    choose = random.Random(size)
    for _ in range(50):
        numels, bounds, expected = [], [], []
        for _ in range(choose.randrange(6)):
            numel = choose.randrange(5)
            cuts = sorted(
                [0, numel, *(choose.randrange(numel + 1) for _ in range(choose.randrange(3)))]
            )
            owners = [
                (choose.randrange(size), start, stop) for start, stop in itertools.pairwise(cuts)
            ]
            is_common = choose.random() < 0.3
            numels.append(numel)
            bounds.append(None if is_common else tuple(owners))
            expected += (
                [-1] * numel
                if is_common
                else [rank for rank, start, stop in owners for _ in range(start, stop)]
            )
        parts = split(numels, bounds, size)
        found = [None] * len(expected)
        for rank, ranges in [*enumerate(parts.by_rank), (-1, parts.common)]:
            for start, stop in ranges:
                assert found[start:stop] == [None] * (stop - start), "no element has two owners"
                found[start:stop] = [rank] * (stop - start)
            assert all(one[1] < other[0] for one, other in itertools.pairwise(ranges)), (
                "neighbours are one range"
            )
        assert found == expected


def test_bounds_are_taken_by_place():
    own = parameters()
    frozen = torch.nn.Parameter(torch.zeros(7), requires_grad=False)
    bounds = {
        own[3]: [(1, 0, 2), (0, 2, 5)],
        own[2]: (),
        own[1]: ((1, 0, 0), (1, 0, 1)),
        frozen: ((0, 0, 7),),
    }
    assert bounds_by_place(Ownership(bounds), own, "abcd", 2) == {
        3: ((1, 0, 2), (0, 2, 5)),
        2: (),
        1: ((1, 0, 0), (1, 0, 1)),
    }


@pytest.mark.parametrize(
    ("owners", "error", "words"),
    [
        (((0, 0, 4),), ValueError, "cover 4 of its 6 elements"),
        (((0, 0, 7),), ValueError, "cover 7 of its 6 elements"),
        (((0, 0, 2), (1, 3, 6)), ValueError, "a gap, or overlap, at element 2"),
        (((0, 0, 4), (1, 3, 6)), ValueError, "a gap, or overlap, at element 4"),
        (((1, 3, 6), (0, 0, 3)), ValueError, "at element 0"),
        (((0, 0, 3), (2, 3, 6)), ValueError, "rank 2 as an owner; the group has ranks 0 to 1"),
        (((-1, 0, 6),), ValueError, "rank -1"),
        ((), ValueError, "cover 0"),
        (3, TypeError, "tuples of (rank, start, stop)"),
        (((0, 6),), TypeError, "tuples of (rank, start, stop)"),
    ],
)
def test_what_covers_no_parameter_is_refused(owners, error, words):
    own = parameters()
    with pytest.raises(error, match="'a'") as raised:
        bounds_by_place(Ownership({own[0]: owners}), own, "abcd", 2)
    assert words in str(raised.value)


def test_what_is_no_mapping_of_this_module_is_refused():
    own, other = parameters(), parameters()
    with pytest.raises(
        ValueError, match=r"shape \(5,\) whose gradients this module does not reduce"
    ):
        bounds_by_place(Ownership({other[3]: ((0, 0, 5),)}), own, "abcd", 2)
    with pytest.raises(TypeError, match="must be a mapping"):
        bounds_by_place(Ownership([(own[0], 0)]), own, "abcd", 2)
    with pytest.raises(TypeError, match="a key of str"):
        bounds_by_place(Ownership({"a": ((0, 0, 6),)}), own, "abcd", 2)
    for buffers, error in ((0, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="number of buffers"):
            bounds_by_place(Ownership({}, buffers), own, "abcd", 2)
    assert ownership_of(lambda state, bucket: None) is None and ownership_of(None) is None
