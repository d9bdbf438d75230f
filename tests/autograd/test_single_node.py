"""Execution of one node: its hooks run, no node below runs, and anomaly mode reports only NaN."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.autograd.graph import GradientEdge

from mpidist.autograd.single_node import run_alone


def call(edges, gradients, targets):
    roots, ends = [[GradientEdge(*edge) for edge in some] for some in (edges, targets)]
    return torch.autograd.grad(roots, ends, gradients, retain_graph=True, allow_unused=True)


@pytest.mark.parametrize("is_anomaly", [False, True])
def test_nothing_below_runs_and_nothing_is_reported(is_anomaly):
    x, log = torch.ones(2, requires_grad=True), []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with torch.autograd.set_detect_anomaly(is_anomaly):
            below = x * 2
            below.register_hook(lambda gradient: log.append("below"))
            node = (below * torch.tensor([3.0, 4.0])).grad_fn
            node.register_prehook(lambda gradients: log.append("before"))
            made = run_alone(call, node, [(node, 0)], [torch.ones(2)])
            assert torch.is_anomaly_enabled() == is_anomaly
    assert not [one for one in found if "Error detected" in str(one.message)]
    assert made[0].tolist() == [3, 4] and made[1] is None and log == ["before"]


def test_anomaly_mode_finds_nan():
    x = torch.zeros(2, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            node = torch.sqrt(x * 1).grad_fn
            with pytest.raises(
                RuntimeError, match="Function 'SqrtBackward0' returned nan values in its 0th output"
            ):
                run_alone(call, node, [(node, 0)], [torch.zeros(2)])
            assert torch.is_anomaly_enabled()
    assert torch.isnan(run_alone(call, node, [(node, 0)], [torch.zeros(2)])[0]).all()
