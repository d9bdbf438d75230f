"""Implementations of distributed autograd under test, and the functions called on their workers.

A call names its function by module and name. Neither mpidist nor MPI is imported until a stack
needs it, because the processes of TensorPipe import this module, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor
WIDTH, BATCH = 64, 16
RATE = 1e-3  # SGD
TRAINED = 10  # passes per trainer


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
    stack, own, x = stack_of(name), Layer(number), input_of_chain()
    last_gradients: list[list[Tensor]] = []
    for left in reversed(range(passes)):
        with stack.autograd.context() as context:
            hidden = torch.relu(own.linear(x))
            result = stack.rpc.rpc_sync(layer.owner(), run_layer, args=(layer, hidden))
            stack.backward(context, loss_of(result))
            found = stack.autograd.get_gradients(context)
            if not left:
                last_gradients.append([found[parameter] for parameter in own.linear.parameters()])
                last_gradients.append(
                    stack.rpc.rpc_sync(layer.owner(), gradients, args=(name, layer, context))
                )
    return last_gradients


def input_of_chain() -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))


def loss_of(result: Tensor) -> Tensor:
    return result.square().mean()
