"""Send and receive nodes: what the forward pass leaves in the autograd graphs of both ends of a message.

A **send** is a C++ node with one edge for each tensor of the message that needs a gradient. The
node owns the graph below it; the Python object of a node of a Python function would not. A
**receive** is a node whose outputs are the tensors that arrived. It has torch's name, and none of
its outputs is a view, so that they may be changed in place. The engine takes gradients at its
inputs and never runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensor = torch.Tensor
Node = Any  # of torch's autograd graph
Edge = tuple[Any, int]  # a node and the number of one of its inputs

_UNSENDABLE = (
    b"a gradient is sent to another worker by mpidist.autograd.backward(), not by a node of its own"
)
_UNRECEIVED = (
    "a received tensor's gradient goes to the worker that sent it: use "
    "mpidist.autograd.backward(context_id, roots), "
    "not backward() or torch.autograd.grad()"
)


def _forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    # Not the inputs themselves: those would become views, which may not be changed in place.
    return tuple([tensor.detach() for tensor in tensors])


def _backward(ctx: Any, *gradients: Any) -> Any:
    raise RuntimeError(_UNRECEIVED)


# Its nodes are called torch::distributed::autograd::RecvRpcBackward, as torch's are.
_make_class: Any = type(torch.autograd.Function)
_Receive: Any = _make_class(
    "torch::distributed::autograd::RecvRpc",
    (torch.autograd.Function,),
    {
        "__module__": __name__,
        "forward": staticmethod(_forward),
        "backward": staticmethod(_backward),
    },
)
_apply = super(torch.autograd.Function, _Receive).apply


def _types() -> tuple[Any, Any]:
    leaf = torch.zeros(1, requires_grad=True)
    with torch.enable_grad():
        return type(leaf.view_as(leaf).grad_fn.next_functions[0][0]), type(_apply(leaf)[0].grad_fn)  # type: ignore[union-attr]


# types of nodes: where gradients of leaves and of received tensors are taken
LEAF, RECEIVE = _types()


class Send:
    """A message that left with tensors that need gradients.

    Attributes:
        to: The receiver's rank.
        is_answer: It answered a request.
    """

    __slots__ = ("_node", "is_answer", "to")

    def __init__(self, to: int, is_answer: bool, tensors: Sequence[Tensor]) -> None:
        self.to = to
        self.is_answer = is_answer
        outputs = _with_graph(torch._C._functions.DelayedError(_UNSENDABLE, len(tensors)), tensors)
        self._node: Node = (outputs[0] if type(outputs) is tuple else outputs).grad_fn

    @property
    def next_functions(self) -> tuple[Edge, ...]:
        """Return where the gradients of its tensors go, in their order."""
        edges: tuple[Edge, ...] = self._node.next_functions
        return edges

    def name(self) -> str:
        """Return torch's name of such a node."""
        return "torch::distributed::autograd::SendRpcBackward"

    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of its tensors."""
        return [tuple(one.shape) for one in self.metadata()]

    def metadata(self) -> Sequence[Any]:
        """Return shape, dtype and device of each of its tensors."""
        found: Sequence[Any] = self._node._input_metadata
        return found


class Receive:
    """A message that arrived with tensors that need gradients.

    Attributes:
        message: Its number at the sender.
        source: The sender's rank.
        is_answer: It answered a request.
        width: The number of those tensors.
    """

    __slots__ = ("is_answer", "message", "source", "width")

    def __init__(self, message: int, source: int, is_answer: bool, width: int) -> None:
        self.message = message
        self.source = source
        self.is_answer = is_answer
        self.width = width


def received(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors that stand for those that arrived, all of which need gradients: outputs of one node."""
    outputs: tuple[Tensor, ...] = _with_graph(_apply, tensors)
    return outputs


def _with_graph(function: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
    """Apply a function of the autograd graph, also under ``no_grad``."""
    if torch.is_grad_enabled():  # mostly; a change of mode costs nearly as much as a node
        return function(*tensors)
    with torch.enable_grad():
        return function(*tensors)
