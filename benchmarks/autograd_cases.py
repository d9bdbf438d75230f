"""Cases for two implementations of distributed autograd: models over workers, and called functions.

Neither mpidist nor MPI is imported until a case needs its implementation, because the processes of
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
_RATE = 1e-3  # SGD
_TRAINED = 10  # per trainer

FEW = "4 layers"
STEP = "4 layers and step"
TRAINERS = "trainers, one server"


@dataclass(frozen=True)
class Stack:
    """One implementation of RPC, autograd and optimizers.

    Attributes:
        name: Contender's name in tables.
        mode: Argument ``mode`` of ``backward``; None for torch, which has no modes.
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


# Called functions. A call names its function by module and name, so they are defined here.


class Layer:
    """A linear layer, WIDTH × WIDTH, whose parameters depend on its number alone."""

    def __init__(self, number: int) -> None:
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in self.linear.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH**0.5)


def run_layer(layer: Any, x: Tensor) -> Tensor:
    """Apply a layer of this worker; input and output are (BATCH, WIDTH)."""
    result: Tensor = layer.local_value().linear(x)
    return result


def gradients(name: str, layer: Any, context: int) -> list[Tensor]:
    """Return the gradients of a context for a layer of this worker."""
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
    """Run forward and backward passes over a local layer and the server's, each in its own context.

    Returns:
        The gradients of the last pass: of the local layer, and of the server's.
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
    """Return the resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


# Cases.


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
    made = [Case(chain_of(depth), 1, partial(_chain, depth, False)) for depth in depths]
    made.append(Case(STEP, 1, partial(_chain, 4, True)))
    if workers > 2:
        made.append(Case(TRAINERS, _TRAINED, _trainers))
    return made


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
        """Compare the first pass with the same model in one process.

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
    # Worker 0 is the server: while it waits for the trainers, its RPC threads answer their calls.
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
    """Run ``one_pass`` several times."""
    for _ in repeat(None, passes):
        one_pass()
