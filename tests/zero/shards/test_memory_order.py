"""Order of a parameter's elements in a flat buffer: their order in memory, for any strides.

Apart from ``test_flat_buffers.py``: each rank of an MPI job would import hypothesis for this one
test of one process.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.kernels.view import is_dense, laid_out
from mpidist.zero.shards.flat_buffers import in_memory_order

SHAPES = st.lists(st.integers(1, 4), max_size=4)


@settings(max_examples=200, deadline=None)
@given(SHAPES, st.randoms(use_true_random=False), st.booleans())
def test_elements_keep_the_order_in_which_they_lie(shape, random, with_gap):
    order = list(range(len(shape)))
    random.shuffle(order)
    base = torch.randn([*shape, 2])[..., 0] if with_gap else torch.randn(shape)
    parameter = base.permute(order)
    flat = torch.full((parameter.numel() + 3,), -1.0)
    part = flat[2 : 2 + parameter.numel()]
    view = laid_out(part, parameter)
    view.copy_(parameter)
    assert torch.equal(view, parameter) and view.shape == parameter.shape
    assert flat[1] == flat[-1] == -1 and not (part == -1).any()
    assert is_dense(view) and (view.stride() == parameter.stride()) == is_dense(parameter)
    assert (
        torch.equal(in_memory_order(view, view), part)
        and in_memory_order(view, view).data_ptr() == part.data_ptr()
    )
    other = torch.randn(shape).permute(order).contiguous()  # a gradient in another order
    expected = laid_out(torch.empty(parameter.numel()), view).copy_(other)
    assert torch.equal(in_memory_order(other, view), in_memory_order(expected, view))
    assert is_dense(parameter) or with_gap
