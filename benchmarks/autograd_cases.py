"""Functions that are called, models over workers, and cases for both implementations of distributed autograd.

Neither mpidist nor MPI is imported before its implementation is asked for: the processes of
TensorPipe import this module, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any

import psutil
import timing
import torch

Tensor = torch.Tensor
Pass = Callable[[], Any]
WIDTH, BATCH = 64, 16
_RATE = 1e-3  # of SGD
_TRAINED = 10  # passes of each trainer

FEW = "4 layers"
STEP = "4 layers and step"
TRAINERS = "trainers, one server"


@dataclass(frozen=True)
class Stack:
    """RPC, autograd and optimizers that belong together.

    Attributes:
        name: The contender's, for tables.
        mode: Of ``backward``; None where it has none.
    """

    name: str
    rpc: Any
    autograd: Any
    optimizer: Any
    mode: str | None

    def backward(self, context: int, root: Tensor) -> None:
        """Run a backward pass from one root."""
        if self.mode is None:
            self.autograd.backward(context, [root])
        else:
            self.autograd.backward(context, [root], mode=self.mode)


def stack_of(name: str) -> Stack:
    """Return a contender: ``tensorpipe``, ``mpidist`` (FAST mode) or ``smart``."""
    if name == "tensorpipe":
        import torch.distributed.autograd
        import torch.distributed.rpc
        from torch.distributed.optim import DistributedOptimizer

        return Stack(
            name, torch.distributed.rpc, torch.distributed.autograd, DistributedOptimizer, None
        )
    import mpidist.autograd
    import mpidist.optim
    import mpidist.rpc

    mode = "smart" if name == "smart" else "fast"
    return Stack(name, mpidist.rpc, mpidist.autograd, mpidist.optim.DistributedOptimizer, mode)


# Functions that are called. They go by name, hence from this module.


class Layer:
    """A linear layer, WIDTH × WIDTH, whose parameters depend on its number alone."""

    def __init__(self, number: int) -> None:
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in self.linear.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH**0.5)


def run_layer(layer: Any, x: Tensor) -> Tensor:
    """Apply a layer that lives here; (BATCH, WIDTH) in and out."""
    result: Tensor = layer.local_value().linear(x)
    return result


def gradients(name: str, layer: Any, context: int) -> list[Tensor]:
    """Return the gradients that a context has for a layer that lives here."""
    found = stack_of(name).autograd.get_gradients(context)
    return [found[parameter] for parameter in layer.local_value().linear.parameters()]


def parameters(layer: Any) -> list[Tensor]:
    """Return a layer's parameters."""
    return [parameter.detach() for parameter in layer.local_value().linear.parameters()]


def parameter_references(name: str, layer: Any) -> list[Any]:
    """Return references to a layer's parameters."""
    rpc = stack_of(name).rpc
    return [rpc.RRef(parameter) for parameter in layer.local_value().linear.parameters()]


def train(name: str, layer: Any, number: int, passes: int) -> list[list[Tensor]]:
    """Run passes over an own layer and the server's, each in a context of its own.

    Returns:
        The gradients of the last pass: of the own layer, and of the server's.
    """
    stack, own, x = stack_of(name), Layer(number), _input()
    made: list[list[Tensor]] = []
    for left in reversed(range(passes)):
        with stack.autograd.context() as context:
            hidden = torch.relu(own.linear(x))
            result = stack.rpc.rpc_sync(layer.owner(), run_layer, args=(layer, hidden))
            stack.backward(context, _loss(result))
            found = stack.autograd.get_gradients(context)
            if not left:
                made.append([found[parameter] for parameter in own.linear.parameters()])
                made.append(
                    stack.rpc.rpc_sync(layer.owner(), gradients, args=(name, layer, context))
                )
    return made


def resident_bytes() -> int:
    """Return how much memory this process holds."""
    return int(psutil.Process().memory_info().rss)


# Cases.


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        operation: For tables.
        passes: Forward and backward passes in one call.
        make: (stack, workers) checks the results of one call against one process, and returns the
            call.
    """

    operation: str
    passes: int
    make: Callable[[Stack, int], Pass]


def chain_of(depth: int) -> str:
    """Return the name of the case of a chain."""
    return FEW if depth == 4 else f"{depth} layer{'s' * (depth > 1)}"


def cases(depths: Sequence[int], workers: int) -> list[Case]:
    """Return the cases.

    Args:
        depths: Of the chains.
        workers: Several trainers need three or more.
    """
    made = [Case(chain_of(depth), 1, partial(_chain, depth, False)) for depth in depths]
    made.append(Case(STEP, 1, partial(_chain, 4, True)))
    if workers > 2:
        made.append(Case(TRAINERS, _TRAINED, _trainers))
    return made


class Alone:
    """As much of a communicator as timing in one process needs."""

    def Barrier(self) -> None:
        """Return."""

    def allgather(self, value: Any) -> list[Any]:
        """Return the value."""
        return [value]


def measure(
    stacks: Sequence[Stack], cases: Sequence[Case], workers: int, rounds: int, burst_s: float
) -> dict[str, list[timing.Series]]:
    """Check and time all cases of some contenders that take turns; by operation.

    On worker 0 alone.
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
    """Layers on worker 1, called one after the other from worker 0, which applies relu between them.

    Args:
        with_step: Update the parameters after each pass.
    """

    def __init__(self, stack: Stack, depth: int, with_step: bool) -> None:
        self._stack = stack
        self._layers = [
            stack.rpc.remote("worker1", Layer, args=(number,)) for number in range(depth)
        ]
        self._x = _input()
        self._optimizer: Any = None
        if with_step:
            references = [
                one
                for layer in self._layers
                for one in self._of_layer(layer, parameter_references, stack.name)
            ]
            self._optimizer = stack.optimizer(torch.optim.SGD, references, lr=_RATE)

    def _of_layer(
        self, layer: Any, function: Callable[..., Any], name: str | None = None, *args: Any
    ) -> Any:
        given = (layer, *args) if name is None else (name, layer, *args)
        return self._stack.rpc.rpc_sync("worker1", function, args=given)

    def loss(self) -> Tensor:
        """Run the forward pass; return a scalar."""
        x = self._x
        for place, layer in enumerate(self._layers):
            x = self._stack.rpc.rpc_sync(
                "worker1", run_layer, args=(layer, torch.relu(x) if place else x)
            )
        return _loss(x)

    def __call__(self) -> None:
        """Run a forward and a backward pass, and a step."""
        with self._stack.autograd.context() as context:
            self._stack.backward(context, self.loss())
            if self._optimizer is not None:
                self._optimizer.step(context)

    def check(self) -> None:
        """Compare the first pass with one process.

        Raises:
            RuntimeError: Gradients or parameters differ.
        """
        twins = [Layer(number).linear for number in range(len(self._layers))]
        x = self._x
        for place, twin in enumerate(twins):
            x = twin(torch.relu(x) if place else x)
        _loss(x).backward()
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
            torch.optim.SGD([one for twin in twins for one in twin.parameters()], lr=_RATE).step()
        now = [self._of_layer(layer, parameters) for layer in self._layers]
        _compare(self._stack, now, [[one.detach() for one in twin.parameters()] for twin in twins])


def _chain(depth: int, with_step: bool, stack: Stack, workers: int) -> Pass:
    made = Chain(stack, depth, with_step)
    made.check()
    return made


def _trainers(stack: Stack, workers: int) -> Pass:
    # Worker 0 serves: its threads answer while it waits for the trainers.
    layer = stack.rpc.RRef(Layer(0))

    def run(passes: int = _TRAINED) -> list[Any]:
        futures = [
            stack.rpc.rpc_async(f"worker{number}", train, args=(stack.name, layer, number, passes))
            for number in range(1, workers)
        ]
        return [future.wait() for future in futures]

    for number, found in enumerate(run(2), 1):
        own, server = Layer(number).linear, Layer(0).linear
        _loss(server(torch.relu(own(_input())))).backward()
        _compare(stack, found, [[one.grad for one in twin.parameters()] for twin in (own, server)])
    return run


def _input() -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))


def _loss(result: Tensor) -> Tensor:
    return result.square().mean()


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
    """Run passes."""
    for _ in repeat(None, passes):
        one_pass()
