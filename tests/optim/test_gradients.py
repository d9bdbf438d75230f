"""Norms and scaling against torch.nn.utils."""

from __future__ import annotations

import pytest
import torch

from mpidist.errors import MpidistError
from mpidist.optim import gradients
from tests.tools.transfers import CUDA, counted, waits


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, 0.0, float("inf")])
def test_the_norm_of_two_workers_is_that_of_one(norm_type):
    given = [torch.randn(3, 4), torch.randn(()), torch.randn(5).double(), torch.randn(2).bfloat16()]
    parts = [
        gradients.norms([given[0], None, given[1]], norm_type),
        gradients.norms(given[2:], norm_type),
        torch.zeros(0),
    ]
    expected = torch.nn.utils.get_total_norm(given, norm_type)
    torch.testing.assert_close(gradients.total_norm(parts, norm_type), expected, check_dtype=False)


def test_no_gradients_at_all():
    assert gradients.total_norm([gradients.norms([None], 2.0)], 2.0) == 0.0


def test_sparse_gradients_count_once_where_rows_occur_twice():
    sparse = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 2), (3, 2))
    assert gradients.norms([sparse], 1.0).item() == 4.0
    gradients.scale([sparse, None, dense := torch.ones(2)], 0.5)
    assert torch.equal(sparse.to_dense()[1], torch.ones(2))
    assert torch.equal(dense, torch.full((2,), 0.5))


def test_gradients_in_the_order_of_the_parameters(given):
    from tests.optim import owners

    first, second = torch.ones(1), torch.ones(1)
    owners.contexts[1] = {second: torch.zeros(1)}
    found = gradients.of_parameters(1, [first, second])
    assert found[0] is None
    assert torch.equal(found[1], torch.zeros(1))
    with pytest.raises(MpidistError, match="Could not find autograd context with id: 9"):
        gradients.of_parameters(9, [first])


def mixed(device):
    return [
        torch.ones(place + 1, device=device).to((torch.float32, torch.bfloat16)[place % 2])
        for place in range(40)
    ]


def test_norms_of_a_device_are_one_transfer_to_the_host():
    with counted() as counts:
        norms = gradients.norms([None, *mixed(CUDA)], 2.0)
        assert norms.device.type == "cpu" and norms.shape == (40,)
        assert counts.down == ["_to_copy"]


@pytest.mark.gpu
def test_norms_of_a_gpu_wait_once():
    given = mixed(CUDA)
    with waits() as found:
        norms = gradients.norms(given, 2.0)
    assert len(found) == 1
    torch.testing.assert_close(norms, gradients.norms([each.cpu() for each in given], 2.0))
