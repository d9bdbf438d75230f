"""Pieces of parameters, their gradients, and both in the base optimizer."""

from __future__ import annotations

import pytest
import torch

from mpidist.zero.shards.pieces import Gradients, Piece

Parameter = torch.nn.Parameter


def cut(parameter, start, stop):
    return Piece(0, parameter, start, stop, Parameter(torch.empty(stop - start)), (0, 0))


@pytest.mark.parametrize("is_ordered", [True, False])
def test_gradient_of_a_piece_is_that_part_in_the_order_of_the_elements(is_ordered):
    parameter = Parameter(torch.randn(4, 6, 2, 2).to(memory_format=torch.channels_last))
    parameter.grad = torch.randn(4, 6, 2, 2)
    if is_ordered:
        parameter.grad = parameter.grad.to(memory_format=torch.channels_last)
    piece = cut(parameter, 10, 50)
    expected = parameter.grad.permute(0, 2, 3, 1).reshape(-1)[10:50].clone()
    found = piece.gradient()
    assert torch.equal(found, expected) and not piece.is_whole and not piece.is_parameter
    # Scaling a piece's gradient scales the same part of the parameter's gradient, and nothing else.
    before = parameter.grad.permute(0, 2, 3, 1).reshape(-1).clone()
    found.mul_(3)
    piece.put_back(found)
    before[10:50] *= 3
    assert torch.equal(parameter.grad.permute(0, 2, 3, 1).reshape(-1), before)
    assert (
        found.untyped_storage().data_ptr() == parameter.grad.untyped_storage().data_ptr()
    ) == is_ordered


def test_gradients_are_set_during_a_step_and_frozen_ones_hidden():
    parameters = [Parameter(torch.ones(70)) for _ in range(4)]
    for parameter in parameters[:3]:
        parameter.grad = torch.arange(70.0)
    kept = [parameter.grad for parameter in parameters]
    part, none = cut(parameters[0], 64, 70), cut(parameters[3], 0, 64)
    frozen_part = cut(parameters[1], 0, 64)
    frozen = Piece(2, parameters[2], 0, 70, parameters[2])
    gradients = Gradients([part, none, frozen_part], [frozen_part, frozen])
    for _ in range(2):
        gradients.attach()
        assert torch.equal(part.tensor.grad, torch.arange(64.0, 70.0)) and none.tensor.grad is None
        assert part.tensor.grad.data_ptr() == kept[0][64:].data_ptr()
        assert frozen_part.tensor.grad is None and frozen.parameter.grad is None
        gradients.detach()
        assert all(
            parameter.grad is gradient for parameter, gradient in zip(parameters, kept, strict=True)
        )
        assert all(piece.tensor.grad is None for piece in (part, none, frozen_part))


def test_state_lies_in_the_shape_and_strides_of_the_piece():
    parameter = Parameter(torch.randn(3, 5).t())
    whole = Piece(0, parameter, 0, 15, parameter, (0, 64))
    flat = torch.arange(100.0)
    view = whole.state_view(flat)
    assert (
        view.shape == (5, 3) and view.stride() == parameter.stride() and view.storage_offset() == 64
    )
    assert whole.is_whole and whole.is_parameter and whole.gradient() is None


def test_a_sparse_gradient_has_no_parts():
    parameter = Parameter(torch.ones(10, 3))
    parameter.grad = torch.sparse_coo_tensor(
        [[1]], torch.ones(1, 3), (10, 3), check_invariants=True
    )
    assert Piece(0, parameter, 0, 30, parameter).gradient() is parameter.grad
    with pytest.raises(RuntimeError, match="parameter 0 has a gradient of layout"):
        cut(parameter, 0, 30).gradient()
