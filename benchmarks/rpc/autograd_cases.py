"""Cases of distributed autograd: models over workers, checked against one process.

The processes of TensorPipe import this module, so that it imports neither mpidist nor MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any

import torch

from harness import timing
from rpc.autograd_stacks import (
    RATE,
    TRAINED,
    Layer,
    Stack,
    gradients,
    input_of_chain,
    loss_of,
    parameter_references,
    parameters,
    run_layer,
    train,
)

Tensor = torch.Tensor
Pass = Callable[[], Any]

FEW = "4 layers"
STEP = "4 layers and step"
TRAINERS = "trainers, one server"


@dataclass(frozen=True)
class Case:
    """One distributed model and its training.

    Attributes:
        operation: Name in tables.
        passes: Forward and backward passes in one call.
        make: ``make(stack, workers)`` compares one call with a model in one process and returns the
            call.
    """

    operation: str
    passes: int
    make: Callable[[Stack, int], Pass]


def chain_of(depth: int) -> str:
    """Return the name of a chain's case."""
    return FEW if depth == 4 else f"{depth} layer{'s' * (depth > 1)}"


def cases(depths: Sequence[int], workers: int) -> list[Case]:
    """Return the cases.

    Args:
        depths: Layers of each chain.
        workers: Number of workers; the case with several trainers needs three or more.
    """
    found = [Case(chain_of(depth), 1, partial(_chain, depth, False)) for depth in depths]
    found.append(Case(STEP, 1, partial(_chain, 4, True)))
    if workers > 2:
        found.append(Case(TRAINERS, TRAINED, _trainers))
    return found


class Alone:
    """Communicator of one process, as far as ``timing`` uses one."""

    def Barrier(self) -> None:
        """Return."""

    def allgather(self, value: Any) -> list[Any]:
        """Return the value."""
        return [value]


def measure(
    stacks: Sequence[Stack], cases: Sequence[Case], workers: int, rounds: int, burst_s: float
) -> dict[str, list[timing.Series]]:
    """Check and time all cases; contenders take turns. Return the series by operation.

    Only worker 0 calls this.
    """
    found = {}
    for case in cases:
        contenders = [
            timing.Contender(stack.name, (case.make(stack, workers),), ()) for stack in stacks
        ]
        timed = timing.time_rounds(Alone(), contenders, rounds, burst_s)
        found[case.operation] = [
            replace(
                one,
                calls_per_pass=case.passes,
                rounds_us=tuple(us / case.passes for us in one.rounds_us),
            )
            for one in timed
        ]
    return found


class Chain:
    """Layers on worker 1, called in turn from worker 0, which applies relu between the layers.

    Args:
        with_step: Whether an optimizer updates the parameters after each pass.
    """

    def __init__(self, stack: Stack, depth: int, with_step: bool) -> None:
        self._stack = stack
        self._layers = [
            stack.rpc.remote("worker1", Layer, args=(number,)) for number in range(depth)
        ]
        self._x = input_of_chain()
        self._optimizer: Any = None
        if with_step:
            references = [
                one
                for layer in self._layers
                for one in self._of_layer(layer, parameter_references, stack.name)
            ]
            self._optimizer = stack.optimizer(torch.optim.SGD, references, lr=RATE)

    def _of_layer(
        self, layer: Any, function: Callable[..., Any], name: str | None = None, *args: Any
    ) -> Any:
        arguments = (layer, *args) if name is None else (name, layer, *args)
        return self._stack.rpc.rpc_sync("worker1", function, args=arguments)

    def loss(self) -> Tensor:
        """Run the forward pass; return a scalar."""
        x = self._x
        for place, layer in enumerate(self._layers):
            x = self._stack.rpc.rpc_sync(
                "worker1", run_layer, args=(layer, torch.relu(x) if place else x)
            )
        return loss_of(x)

    def __call__(self) -> None:
        """Run a forward and a backward pass, and a step."""
        with self._stack.autograd.context() as context:
            self._stack.backward(context, self.loss())
            if self._optimizer is not None:
                self._optimizer.step(context)

    def check(self) -> None:
        """Compare the first pass with the same model in one process.

        Raises:
            RuntimeError: Gradients or parameters differ.
        """
        twins = [Layer(number).linear for number in range(len(self._layers))]
        x = self._x
        for place, twin in enumerate(twins):
            x = twin(torch.relu(x) if place else x)
        loss_of(x).backward()
        with self._stack.autograd.context() as context:
            self._stack.backward(context, self.loss())
            found = [
                self._of_layer(layer, gradients, self._stack.name, context)
                for layer in self._layers
            ]
            if self._optimizer is not None:
                self._optimizer.step(context)
        _compare(self._stack, found, [[one.grad for one in twin.parameters()] for twin in twins])
        if self._optimizer is not None:
            torch.optim.SGD([one for twin in twins for one in twin.parameters()], lr=RATE).step()
        now = [self._of_layer(layer, parameters) for layer in self._layers]
        _compare(self._stack, now, [[one.detach() for one in twin.parameters()] for twin in twins])


def _chain(depth: int, with_step: bool, stack: Stack, workers: int) -> Pass:
    chain = Chain(stack, depth, with_step)
    chain.check()
    return chain


def _trainers(stack: Stack, workers: int) -> Pass:
    # Worker 0 is the server: while it waits for the trainers, its RPC threads answer their calls.
    layer = stack.rpc.RRef(Layer(0))

    def run(passes: int = TRAINED) -> list[Any]:
        futures = [
            stack.rpc.rpc_async(f"worker{number}", train, args=(stack.name, layer, number, passes))
            for number in range(1, workers)
        ]
        return [future.wait() for future in futures]

    for number, found in enumerate(run(2), 1):
        own, server = Layer(number).linear, Layer(0).linear
        loss_of(server(torch.relu(own(input_of_chain())))).backward()
        _compare(stack, found, [[one.grad for one in twin.parameters()] for twin in (own, server)])
    return run


def _compare(
    stack: Stack, found: Sequence[Sequence[Tensor]], right: Sequence[Sequence[Any]]
) -> None:
    for ours, theirs in zip(found, right, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            if not torch.allclose(one, other, rtol=1e-4, atol=1e-7):
                raise RuntimeError(
                    f"wrong result of {stack.name}: off by {float((one - other).abs().max()):g} "
                    "from one process"
                )


def repeated(one_pass: Pass, passes: int) -> None:
    """Run ``one_pass`` several times."""
    for _ in repeat(None, passes):
        one_pass()
