"""Send and receive nodes that the forward pass adds to the autograd graphs of sender and receiver.

A **send** is a C++ node with one edge for each tensor of the message that needs a gradient. A C++
node owns the graph below it; the Python object of a Python function's node does not. A **receive**
is a node whose outputs are the received tensors. The node has torch's name. Its outputs are no
views, so they may be changed in place. The engine captures gradients at the inputs of a receive and
never runs the node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol, TypeAlias

import torch
from torch.autograd.graph import Node

Tensor = torch.Tensor
Gradient: TypeAlias = Tensor | None
Edge: TypeAlias = tuple[Node, int]  # node, index of its input

_UNSENDABLE = (
    b"a gradient is sent to another worker by mpidist.autograd.backward(), not by a node of its own"
)
_UNRECEIVED = (
    "a received tensor's gradient goes to the worker that sent it: use mpidist.autograd."
    "backward(context_id, roots), not backward() or torch.autograd.grad()"
)


def _forward(ctx: object, *tensors: Tensor) -> tuple[Tensor, ...]:
    # Returned inputs would become views, which may not be changed in place.
    return tuple([tensor.detach() for tensor in tensors])


def _backward(ctx: object, *gradients: object) -> NoReturn:
    raise RuntimeError(_UNRECEIVED)


# torch appends "Backward": the nodes are named as torch's own.
_Receive: Any = torch.autograd.function.FunctionMeta(
    "torch::distributed::autograd::RecvRpc",
    (torch.autograd.Function,),
    {
        "__module__": __name__,
        "forward": staticmethod(_forward),
        "backward": staticmethod(_backward),
    },
)
_apply = super(torch.autograd.Function, _Receive).apply


class Leaf(Node):
    """Node that accumulates the gradient of a leaf, for annotations."""

    variable: Tensor


def _types() -> tuple[type[Leaf], type[Node]]:
    leaf = torch.zeros(1, requires_grad=True)
    with torch.enable_grad():
        view = leaf.view_as(leaf).grad_fn
        assert view is not None
        accumulate: Any = view.next_functions[0][0]
        return type(accumulate), type(_apply(leaf)[0].grad_fn)


# Node types of leaves and of received tensors.
LEAF, RECEIVE = _types()


class Metadata(Protocol):
    """Properties of a tensor that a node keeps."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Send:
    """A sent message with tensors that need gradients.

    Attributes:
        to: Rank of the receiver.
        is_answer: The message is an answer, not a request.
    """

    __slots__ = ("_node", "is_answer", "to")

    def __init__(self, to: int, is_answer: bool, tensors: Sequence[Tensor]) -> None:
        self.to = to
        self.is_answer = is_answer
        outputs = _with_graph(torch._C._functions.DelayedError(_UNSENDABLE, len(tensors)), tensors)
        self._node: Any = (outputs[0] if type(outputs) is tuple else outputs).grad_fn

    @property
    def next_functions(self) -> tuple[Edge, ...]:
        """Edges that receive the gradients of the tensors, in the order of the tensors."""
        edges: tuple[Edge, ...] = self._node.next_functions
        return edges

    def name(self) -> str:
        """Return torch's name of such a node."""
        return "torch::distributed::autograd::SendRpcBackward"

    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the tensors."""
        return [tuple(one.shape) for one in self.metadata()]

    def metadata(self) -> Sequence[Metadata]:
        """Return shape, dtype and device of each tensor."""
        found: Sequence[Metadata] = self._node._input_metadata
        return found


class Receive:
    """A received message with tensors that need gradients.

    Attributes:
        message: Number of the message at the sender.
        source: Rank of the sender.
        is_answer: The message is an answer, not a request.
        width: Number of these tensors.
    """

    __slots__ = ("is_answer", "message", "source", "width")

    def __init__(self, message: int, source: int, is_answer: bool, width: int) -> None:
        self.message = message
        self.source = source
        self.is_answer = is_answer
        self.width = width


def received(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the received tensors as outputs of one new node; all must need gradients."""
    outputs: tuple[Tensor, ...] = _with_graph(_apply, tensors)
    return outputs


def _with_graph(function: Callable[..., object], tensors: Sequence[Tensor]) -> Any:
    """Apply a function with grad mode enabled."""
    # Grad mode is mostly on, and changing the mode takes nearly as long as creating a node.
    if torch.is_grad_enabled():
        return function(*tensors)
    with torch.enable_grad():
        return function(*tensors)
