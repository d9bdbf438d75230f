"""Optimizers that read .grad, with gradients as arguments."""

from __future__ import annotations

import pytest
import torch

from mpidist.optim.grad_attribute import GradAttributeOptimizer
from tests.optim.owners import FailsInStep, Halving


def test_gradients_pass_through_the_attribute_and_it_is_restored():
    used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    used.grad, unused.grad = kept = torch.full((2,), 5.0), torch.full((2,), 6.0)
    optimizer = GradAttributeOptimizer(Halving, [used, unused], lr=1.0)
    optimizer.step([torch.ones(2), None])
    assert (used[0].item(), unused[0].item()) == (0.0, 1.0)
    assert (used.grad is kept[0], unused.grad is kept[1]) == (True, True)


def test_it_is_restored_after_an_error():
    parameter = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="Error running"):
        GradAttributeOptimizer(FailsInStep, [parameter]).step([torch.ones(2)])
    assert parameter.grad is None


def test_groups_and_state():
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = GradAttributeOptimizer(Halving, [first])
    optimizer.add_param_group({"params": [second], "lr": 0.25})
    optimizer.step([torch.ones(2)] * 2)
    assert (first[0].item(), second[0].item()) == (0.5, 0.75)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state_dict()["state"] == {0: {"steps": 1}, 1: {"steps": 1}}
    optimizer.remove_last_group()
    optimizer.step([torch.ones(2)])
    assert (first[0].item(), second[0].item()) == (0.0, 0.75)
    assert optimizer.state_dict()["state"] == {0: {"steps": 2}}
