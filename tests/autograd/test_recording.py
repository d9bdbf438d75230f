"""Send and receive nodes: names, ownership of the graph, in-place use of outputs."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from mpidist.autograd.recording import LEAF, RECEIVE, Send, received


class Doubled(torch.autograd.Function):
    """A Python node, which torch frees when no tensor refers to it."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_a_send_keeps_the_graph_of_functions_written_in_python():
    leaf = torch.ones(2, requires_grad=True)
    value = Doubled.apply(leaf)
    send = Send(1, False, [value])
    alive = weakref.ref(value)
    del value
    gc.collect()
    assert alive() is None  # the tensor itself is not kept
    ((node, number),) = send.next_functions
    ((below, _),) = node.next_functions
    assert number == 0 and below.variable is leaf
    assert send.name() == "torch::distributed::autograd::SendRpcBackward" and send.shapes() == [
        (2,)
    ]


@pytest.mark.parametrize("grad_mode", [False, True])
def test_the_edges_of_a_send_are_those_of_its_tensors(grad_mode):
    leaf, sparse = torch.nn.Parameter(torch.ones(2)), torch.eye(2).to_sparse().requires_grad_()
    halves = (leaf * 2).split(1)
    with torch.set_grad_enabled(grad_mode):
        send = Send(1, False, [leaf, halves[1], sparse])
    (first, _), second, (third, _) = send.next_functions
    assert type(first) is LEAF and first.variable is leaf and third.variable is sparse
    assert second == (halves[0].grad_fn, 1)


def test_received_tensors_are_outputs_of_one_node_and_may_be_changed_in_place():
    first, second = received(
        [torch.ones(2, requires_grad=True), torch.eye(2).to_sparse().requires_grad_()]
    )
    node = first.grad_fn
    assert node is second.grad_fn and type(node) is RECEIVE
    assert node.name() == "torch::distributed::autograd::RecvRpcBackward"
    assert second.layout is torch.sparse_coo and not first._is_view()
    first += 1
    first.mul_(3)
    assert first.tolist() == [6, 6] and first.requires_grad
    with torch.no_grad():
        (third,) = received([torch.ones(1, requires_grad=True)])
    assert third.requires_grad


def test_a_local_pass_through_a_received_tensor_is_refused():
    (came,) = received([torch.ones(2, requires_grad=True)])
    with pytest.raises(RuntimeError, match=r"use mpidist\.autograd\.backward"):
        (came * 2).sum().backward()
