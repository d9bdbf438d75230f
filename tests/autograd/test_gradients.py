"""Gradient sums against torch's accumulation into ``.grad``: copied and added gradients."""

from __future__ import annotations

import sys

import pytest
import torch

from mpidist.autograd.gradients import Gradients


def added(leaf, *gradients):
    sums = Gradients()
    for gradient in gradients:
        sums.add([(leaf, gradient)])
    return sums.all()[leaf]


@pytest.fixture(autouse=True)
def borrowed(monkeypatch):
    """Python 3.14 counts no reference for a local variable, and so fewer than there are."""
    true = sys.getrefcount
    monkeypatch.setattr(sys, "getrefcount", lambda one: true(one) - 2)


def test_one_that_is_held_elsewhere_is_copied_and_stays_as_it_is():
    leaf, held = torch.ones(3), torch.arange(3.0)
    assert added(leaf, held, torch.ones(3)).tolist() == [1, 2, 3]
    assert held.tolist() == [0, 1, 2]


def test_one_tensor_for_two_leaves_is_copied_for_both():
    first, second, sums = torch.ones(3), torch.ones(3), Gradients()
    shared = torch.arange(3.0)
    address = shared.data_ptr()
    pairs = [(first, shared), (second, shared)]
    del shared
    sums.add(pairs)
    found = {one.data_ptr() for one in sums.all().values()}
    assert len(found) == 2 and address not in found


@pytest.mark.parametrize(
    "leaf",
    [
        torch.ones(3, 4),
        torch.ones(4, 3).t(),
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.ones(1).expand(3),
    ],
    ids=["contiguous", "transposed", "channels last", "expanded"],
)
@pytest.mark.parametrize("layout", ["contiguous", "like", "expanded"])
def test_layouts_are_those_of_grad(leaf, layout):
    def gradient():
        if layout == "expanded":
            return torch.ones(1).expand(leaf.shape)
        made = torch.arange(float(leaf.numel())).view(leaf.shape)
        return made if layout == "contiguous" else torch.empty_like(leaf).copy_(made)

    twin = leaf.detach().requires_grad_()
    torch.autograd.backward([twin], [gradient()])
    found = added(leaf, gradient())
    assert found.stride() == twin.grad.stride() and torch.equal(found, twin.grad)


def rows(places, values):
    return torch.sparse_coo_tensor([places], torch.tensor(values), (4,), check_invariants=True)


def test_sparse_gradients_add_up_with_each_other_and_with_dense_ones():
    leaf = torch.zeros(4)
    both = added(leaf, rows([1, 1], [1.0, 2.0]), rows([3], [4.0]))
    assert both.is_sparse and both.to_dense().tolist() == [0, 3, 0, 4]
    assert added(leaf, rows([1], [1.0]), torch.ones(4)).tolist() == [1, 2, 1, 1]
    assert added(leaf, torch.ones(4), rows([1], [1.0])).tolist() == [1, 2, 1, 1]


def test_a_sparse_gradient_of_strided_parts_is_copied():
    leaf = torch.zeros(4)
    made = torch.sparse_coo_tensor(
        torch.tensor([[1]]).expand(1, 3), torch.ones(1).expand(3), (4,), is_coalesced=False
    )
    values = made._values().data_ptr()
    sums = Gradients()
    pairs = [(leaf, made)]
    del made
    sums.add(pairs)
    found = sums.all()[leaf]
    assert found._values().data_ptr() != values and found.to_dense().tolist() == [0, 3, 0, 0]


def test_a_parameter_that_a_node_returns_stays_as_it_is():
    leaf, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    found = added(leaf, parameter, parameter)
    assert found.tolist() == [2, 2] and not found.requires_grad and parameter.tolist() == [1, 1]
