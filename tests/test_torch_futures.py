"""Errors of torch's futures: equal each time, and none keeps its future alive."""

import gc
import weakref

import pytest
import torch

from mpidist import torch_futures


class Formatted(Exception):
    """Makes its message of another argument."""

    def __init__(self, number):
        super().__init__(f"number {number}")
        self.number = number


def test_an_error_that_was_raised_leaves_no_future():
    class Seen(torch.futures.Future):
        """A future that Python can refer to weakly."""

    def fails():
        future = Seen()
        torch_futures.set_exception(future, Formatted(3))
        for read in (future.wait, future.value, future.wait):
            with pytest.raises(Formatted, match="number 3"):
                read()
        # torch makes a text of what a callback raises.
        with pytest.raises(RuntimeError, match="Formatted: number 3"):
            future.then(lambda one: one.value()).wait()
        return weakref.ref(future)

    left = fails()
    gc.collect()
    assert left() is None
