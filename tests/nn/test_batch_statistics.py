"""Merged statistics of ranks, against NumPy on the whole batch."""

import numpy as np
import pytest
import torch

from mpidist.nn.batch_statistics import REFUSED, merge, row_of
from tests.tools.transfers import CUDA, counted, no_waits


def row(values, needs=True):
    return row_of(
        values.shape[1],
        len(values),
        needs,
        *((values.mean(0), values.var(0, correction=0)) if len(values) else (None, None)),
    )


@pytest.mark.parametrize("sizes", [(4,), (1, 1), (5, 0, 2), (0, 3), (1, 7, 2, 4)])
def test_merged_statistics_are_those_of_the_whole_batch(sizes):
    parts = [torch.randn(size, 3, dtype=torch.float64) * 0.1 + 1000 for size in sizes]
    found = merge(torch.stack([row(part) for part in parts]))
    whole = torch.cat(parts).numpy()
    assert found.count == len(whole)
    np.testing.assert_allclose(found.mean.numpy(), whole.mean(0), rtol=1e-14)
    np.testing.assert_allclose(found.variance.numpy(), whole.var(0), rtol=1e-9)
    np.testing.assert_allclose(found.unbiased.numpy(), whole.var(0, ddof=1), rtol=1e-9)


def test_no_values_at_all_are_no_error():
    found = merge(torch.stack([row(torch.empty(0, 2)), row(torch.empty(0, 2))]))
    assert found.count == 0 and not found.mean.isnan().any()


@pytest.mark.parametrize(
    ("rows", "own", "words"),
    [
        ([row(torch.ones(1, 2)), row(torch.empty(0, 2))], None, "more than 1 value per channel"),
        (
            [row(torch.ones(3, 2)), row(torch.ones(3, 2), needs=False)],
            None,
            "on ranks [0] and on no other",
        ),
        (
            [row(torch.ones(3, 2)), row_of(2, REFUSED, True, None, None)],
            None,
            "ranks [1] of the group refused",
        ),
        (
            [row_of(2, REFUSED, True, None, None)],
            "expected 2 channels",
            "SyncBatchNorm: expected 2 channels",
        ),
    ],
)
def test_what_all_ranks_refuse(rows, own, words):
    with pytest.raises(ValueError, match="SyncBatchNorm") as caught:
        merge(torch.stack(rows), own)
    assert words in str(caught.value)


def test_a_row_has_the_numbers_of_its_statistics():
    mean, variance = torch.randn(3), torch.rand(3)
    expected = torch.cat([torch.tensor([7.0, 1.0]).double(), mean.double(), variance.double()])
    assert torch.equal(row_of(3, 7, True, mean, variance), expected)
    expected = torch.tensor([REFUSED, *[0.0] * 7], dtype=torch.float64)
    assert torch.equal(row_of(3, REFUSED, False, None, None), expected)


def test_a_row_on_a_device_takes_nothing_from_the_hosts_memory():
    with counted() as counts:
        mean = torch.ones(3, device=CUDA)
        for each in (mean, None):
            row = row_of(3, 7, True, each, each, CUDA)
            assert row.device == CUDA and row.dtype is torch.float64
        assert counts.up == []


@pytest.mark.gpu
def test_a_row_on_a_gpu_waits_for_nothing():
    mean = torch.ones(3, device=CUDA)
    with no_waits():
        row = row_of(3, 7, True, mean, 2 * mean, CUDA)
    assert row.tolist() == [7, 1, 1, 1, 1, 2, 2, 2]
