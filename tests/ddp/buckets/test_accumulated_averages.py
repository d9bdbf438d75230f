"""Additions to an average that one rank alone holds: W times the average, once.

A cleared average is not weighted.
"""

import gc
import weakref

import pytest
import torch

from mpidist.ddp.buckets.accumulated_averages import AccumulatedAverages

SIZE = 3


class Case:
    """One parameter, whose average is 5, and passes that add 1."""

    def __init__(self):
        self.parameter = torch.nn.Parameter(torch.zeros(4))
        self.is_averaging = True
        self.averages = AccumulatedAverages([self.parameter], [0], SIZE, lambda: self.is_averaging)
        self.parameter.grad = torch.full((4,), 5.0)
        self.averages.record(0, self.parameter.grad)

    def add(self, is_averaging, create_graph=False):
        self.is_averaging = is_averaging
        self.parameter.sum().backward(create_graph=create_graph)
        if not is_averaging:
            self.averages.record_addition(0, self.parameter.grad)

    def contribution(self):
        view = self.parameter.grad.detach().clone()
        self.averages.weigh(0, self.parameter.grad, view)
        return float(view[0])


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("create_graph", [False, True])
def test_an_existing_average_is_weighted_once(create_graph):
    case = Case()
    assert case.contribution() == 5 * SIZE, "nothing was added"
    assert case.contribution() == 5, "taken once"
    case = Case()
    for _ in range(2):  # a parameter that is used twice
        case.add(True, create_graph)
    assert case.contribution() == 5 * SIZE + 2
    case = Case()
    for passes in range(1, 3):
        case.add(False, create_graph)
        assert float(case.parameter.grad[0]) == 5 + passes, (
            "a pass of its own finds the average as it is"
        )
    case.add(True, create_graph)
    assert case.contribution() == 5 * SIZE + 3
    case = Case()
    case.add(False, create_graph)
    assert case.contribution() == 5 * SIZE + 1, "no averaging pass has added to it"


def test_a_cleared_or_replaced_gradient_is_not_weighted():
    for passes in (0, 1):
        case = Case()
        for _ in range(passes):
            case.add(False)
        case.parameter.grad = None
        case.add(True)
        assert case.contribution() == 1
        case = Case()
        for _ in range(passes):
            case.add(False)
        case.parameter.grad.zero_()
        case.add(True)
        assert case.contribution() == 1
        case = Case()
        for _ in range(passes):
            case.add(False)
        case.parameter.grad = torch.full((4,), 7.0)
        case.add(False)
        case.add(True)
        assert case.contribution() == 9


def test_passes_that_add_nothing_keep_the_average():
    case = Case()
    torch.autograd.grad(case.parameter.sum(), case.parameter)
    assert case.contribution() == 5 * SIZE
    case = Case()
    marks = case.averages.set_aside()
    case.add(True)
    assert case.contribution() == 6
    case.averages.restore(marks)
    case.parameter.grad = None
    case.add(True)
    assert case.contribution() == 1
    # Under other owners an existing average is still weighted, and a cleared one is not confused
    # with another gradient at its address.
    case.averages.record(0, case.parameter.grad)
    case.averages = AccumulatedAverages([case.parameter], [], SIZE, lambda: True, case.averages)
    case.add(True)
    assert case.contribution() == SIZE + 1
    case.averages.record(0, case.parameter.grad)
    address, case.parameter.grad = case.parameter.grad, None
    case.averages = AccumulatedAverages([case.parameter], [], SIZE, lambda: True, case.averages)
    case.parameter.grad = address
    assert case.contribution() == SIZE + 1, "not weighed again"
    case.averages.close()
    gone = weakref.ref(case.averages)
    del case
    gc.collect()
    assert gone() is None
