"""Flat views of contiguous tensors with any strides."""

import torch

from mpidist.kernels.view import byte_view, flat_view


def test_one_element_has_no_stride():
    x = torch.arange(16.0).view(4, 4)
    for tensor in (torch.arange(4.0)[::4], x[1:2, 2:3].t(), x[3:, 1], torch.tensor(3.0), x):
        assert tensor.is_contiguous()
        flat = flat_view(tensor)
        assert (
            flat.shape == (tensor.numel(),)
            and flat.stride() == (1,)
            and flat.data_ptr() == tensor.data_ptr()
        )
        assert byte_view(tensor).shape == (tensor.nbytes,) and torch.equal(
            byte_view(tensor).view(torch.float32), flat
        )
    assert byte_view(torch.empty(0, 3)).shape == (0,)
