"""Spans of tensors: views that share memory keep sharing it, and gaps are not sent."""

from __future__ import annotations

import pytest
import torch

from tests.comm.serialization.test_tensor_table import described, over, same


@pytest.mark.parametrize("rows", [4, 40_000])
def test_views_that_overlap_or_adjoin_share_memory(rows):
    base = torch.arange(rows * 6.0).view(rows, 6)
    left, right, whole, turned, as_ints = over(
        base[: rows // 2], base[rows // 2 :], base, base.t(), base.view(torch.int32)
    )
    left.zero_()
    right.fill_(1)
    assert torch.equal(
        whole, torch.cat([torch.zeros(rows // 2, 6), torch.ones(rows - rows // 2, 6)])
    )
    assert torch.equal(turned, whole.t())
    whole.zero_()
    assert as_ints.count_nonzero() == 0
    _, parts = described([base[: rows // 2], base[rows // 2 :], base, base.t()])
    assert sum(part.nbytes for part in parts) == base.nbytes  # once


@pytest.mark.parametrize("wide", [torch.int16, torch.int64, torch.complex128])
def test_views_of_other_types_lie_where_they_lay(wide):
    base = torch.arange(96, dtype=torch.uint8)
    narrow, other = base[7:90], base.view(wide)[4:6]
    left, right = over(narrow, other)
    assert same(left, narrow) and same(right, other)
    right.zero_()
    place = 4 * other.element_size() - 7
    assert not left[place : place + other.nbytes].any() and left[place - 1] == place + 6


def test_the_same_tensor_with_and_without_gradient_shares():
    data = torch.ones(5)
    leaf = data.detach().requires_grad_()
    plain, wants = over(data, leaf)
    plain.zero_()
    assert wants.requires_grad and not plain.requires_grad and wants.count_nonzero() == 0


def test_far_apart_views_do_not_bring_what_lies_between():
    base = torch.arange(1_000_000.0)
    _, parts = described([base[:20_000], base[-20_000:]])
    assert sum(part.nbytes for part in parts) == 160_000
    for count in (10, 20_000):
        first, last = over(base[:count], base[-count:])
        assert torch.equal(first, base[:count]) and torch.equal(last, base[-count:])


def test_scattered_views_of_one_storage_keep_sharing():
    base = torch.zeros(1000, 8)
    left, right = over(base[:, :3], base[:, 2:])
    left.fill_(1)
    assert right[:, 0].eq(1).all() and right[:, 1:].count_nonzero() == 0


def test_tensors_that_only_lie_side_by_side_in_memory_stay_apart():
    """Two storages in adjoining memory must not be merged, because a receiver may write to one."""
    memory = bytearray(16_000)
    left = torch.frombuffer(memory, dtype=torch.float32, count=2000)
    right = torch.frombuffer(memory, dtype=torch.float32, count=2000, offset=8000)
    for there in (over(left, right), over(left[:2], right[:2])):
        there[0].fill_(1)
        assert there[1].count_nonzero() == 0
