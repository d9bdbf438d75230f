"""Modules that tests create on other workers."""

from __future__ import annotations

from torch import nn


class Named(nn.Module):
    """Returns its arguments and its training mode."""

    def __init__(self, size, bias=True):
        super().__init__()
        self.linear = nn.Linear(size, size, bias=bias)
        self.again = self.linear

    def forward(self, x, *, scale=1, rest=()):
        if scale == 0:
            raise ZeroDivisionError("scale is 0")
        return {"out": self.linear(x) * scale, "rest": rest, "training": self.training}


def net():
    """Return a net with buffers and submodules, with the same values at every call."""
    made = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    # Not by a global seed, because other threads of the worker use the same generator.
    for parameter in made.parameters():
        nn.init.constant_(parameter, 0.5)
        parameter.data.view(-1)[0] = -1.0
    return made


def no_module():
    """Return an object that is no module."""
    return 3
