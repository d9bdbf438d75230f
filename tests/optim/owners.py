"""Functions for tests to call on the owners of parameters."""

from __future__ import annotations

import threading
import time
from typing import ClassVar

import torch

from tests.tools.support import agree

CONTEXTS = (1, 2, 3, 4, 5)
contexts: dict[int, dict[torch.Tensor, torch.Tensor]] = {}


def parameter(values, requires_grad=True):
    return torch.nn.Parameter(torch.tensor(values), requires_grad=requires_grad)


def module(size):
    """Return a module whose parameters do not depend on the worker."""
    made = torch.nn.Linear(size, 2)
    with torch.no_grad():
        for index, own in enumerate(made.parameters()):
            own.copy_(torch.linspace(-1, 1 + index, own.numel()).view(own.shape))
    return made


def give(rref, context_id, *given):
    """Set a context's gradients of a parameter or a module's parameters; None for none."""
    value = rref.local_value()
    parameters = list(value.parameters()) if isinstance(value, torch.nn.Module) else [value]
    for own, gradient in zip(parameters, given, strict=True):
        if gradient is not None:
            contexts.setdefault(context_id, {})[own] = gradient


def values(rref):
    """Return a parameter's values, or a module's."""
    value = rref.local_value()
    return [
        own.detach().clone()
        for own in (value.parameters() if isinstance(value, torch.nn.Module) else [value])
    ]


def grad_attributes(rref):
    value = rref.local_value()
    return [
        own.grad for own in (value.parameters() if isinstance(value, torch.nn.Module) else [value])
    ]


def set_grad(rref, gradient):
    rref.local_value().grad = gradient


def given_gradient(rref, context_id):
    return contexts[context_id][rref.local_value()]


class Halving(torch.optim.Optimizer):
    """An optimizer without a functional form, which refuses two steps of a parameter at a time."""

    # For all optimizers of this process: those of several trainers share a parameter. Steps of
    # other parameters, as of a twin in the test's own thread, may run at the same time.
    _guard = threading.Lock()
    _in_step: ClassVar[set[int]] = set()

    def __init__(self, params, lr=0.5):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        stepped = {id(own) for group in self.param_groups for own in group["params"]}
        with self._guard:
            if not self._in_step.isdisjoint(stepped):
                raise RuntimeError("two steps at a time")
            self._in_step.update(stepped)
        try:
            # Lets another thread run: a step that is not in turn then begins here.
            time.sleep(1e-3)
            self.halve()
        finally:
            with self._guard:
                self._in_step.difference_update(stepped)

    def halve(self):
        for group in self.param_groups:
            for own in group["params"]:
                if own.grad is not None:
                    own.sub_(own.grad * group["lr"])
                    self.state[own]["steps"] = self.state[own].get("steps", 0) + 1


class OwnAdam(torch.optim.Adam):
    """torch's Adam without its functional form."""


class FailsInStep(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        raise ValueError("Error running optimizer.")


class FailsToBeMade(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
        raise ValueError("Error creating optimizer.")


class Signs:
    """User's functional optimizer with the minimal interface."""

    def __init__(self, params, step=1.0):
        self.params, self.size = params, step

    @torch.no_grad()
    def step(self, gradients):
        for own, gradient in zip(self.params, gradients, strict=True):
            if gradient is not None:
                own.sub_(self.size * gradient.sign())


def on_rank_0(group, run):
    """Run a function on rank 0 while the other ranks answer its calls; fail on all if it fails."""
    text = ""
    if group.rank == 0:
        try:
            run()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
    agree(group, not text, text)
