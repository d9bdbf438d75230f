"""The optimizer with which the tests find steps that are not in turn."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.optim.owners import Halving


class Held(Halving):
    """Stays in its step until the test lets it go."""

    def __init__(self, params):
        super().__init__(params)
        self.entered, self.released = threading.Event(), threading.Event()

    def halve(self):
        self.entered.set()
        assert self.released.wait(20)
        super().halve()


@pytest.fixture
def in_step():
    """Return a parameter that another thread's optimizer is in a step of, and that optimizer."""
    parameter = torch.nn.Parameter(torch.ones(1))
    held = Held([torch.nn.Parameter(torch.ones(1)), parameter])
    thread = threading.Thread(target=held.step)
    thread.start()
    assert held.entered.wait(60)
    yield parameter, held
    held.released.set()
    thread.join(60)
    assert not thread.is_alive()
    # Neither step has left anything behind.
    Halving([parameter]).step()


def test_a_step_of_a_parameter_that_is_in_a_step_is_refused(in_step):
    parameter, held = in_step
    for optimizer in (Halving([parameter]), held):
        with pytest.raises(RuntimeError, match="two steps at a time"):
            optimizer.step()


def test_a_step_of_other_parameters_is_not(in_step):
    """The twin of a worker's optimizer, in the main thread, while a trainer's step runs here."""
    twin = torch.nn.Parameter(torch.ones(1))
    twin.grad = torch.ones(1)
    Halving([twin]).step()
    assert twin.item() == 0.5
