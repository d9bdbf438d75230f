"""The seam for distributed autograd: messages are wrapped, tensors replaced, kinds of its own handled."""

from __future__ import annotations

import contextlib

import pytest
import torch

import mpidist.rpc as rpc
from mpidist.errors import MpidistError
from mpidist.rpc import api, interceptor
from mpidist.rpc.constants import UNSET_RPC_TIMEOUT
from mpidist.rpc.message import Kind

pytestmark = pytest.mark.mpi(min_size=1)


class Doubling:
    """Wraps messages that hold tensors in ids 7 and 8, and doubles the tensors that arrive so."""

    def __init__(self):
        self.served = []
        self.answered = []

    def leaving(self, to, tensors, answered):
        self.answered.append(answered)
        return (int(Kind.FORWARD_AUTOGRAD), (7, 8)) if tensors else None

    def arriving(self, source, outer, tensors):
        assert outer == (Kind.FORWARD_AUTOGRAD, (7, 8))
        return [tensor * 2 for tensor in tensors]

    @contextlib.contextmanager
    def serving(self, source, outer):
        self.served.append((source, outer))
        yield

    def handle(self, source, kind, ids, obj):
        if kind == Kind.CLEANUP_AUTOGRAD:
            raise ValueError("no context")
        return source, kind, ids, obj

    def backward(self, context_id, root, retain_graph):
        self.context_id = context_id

    def debug_info(self):
        return {"num_current_dist_autograd_contexts": "0"}


@pytest.fixture
def doubling(group, workers):
    interceptor.register(made := Doubling())
    group.barrier()  # no message may come to a worker that has none yet
    yield made
    group.barrier()
    interceptor.register(None)
    group.barrier()


def add_one(x):
    return x + 1


def test_tensors_pass_through_on_both_ways(group, workers, to, doubling):
    assert torch.equal(rpc.rpc_sync(to, add_one, args=(torch.ones(2),)), torch.full((2,), 6.0))
    group.barrier()
    assert doubling.served == [((group.rank - 1) % group.size, (Kind.FORWARD_AUTOGRAD, (7, 8)))]
    assert (Kind.FORWARD_AUTOGRAD, (7, 8)) in doubling.answered  # an answer knows what wrapped its request
    assert rpc.rpc_sync(to, add_one, args=(1,)) == 2
    assert "num_current_dist_autograd_contexts" in api._get_debug_info()
    rpc.RRef(torch.ones(1)).backward(3)
    assert doubling.context_id == 3
    group.barrier()


def test_kinds_of_its_own(group, workers, to, doubling):
    agent = api._get_current_rpc_agent()
    peer = agent.rank_of(to)
    call = agent.request(peer, Kind.BACKWARD_AUTOGRAD, ["gradient"], UNSET_RPC_TIMEOUT, "a backward request", ids=(3, 4))
    assert agent.wait_for_result(call) == (group.rank, Kind.BACKWARD_AUTOGRAD, (3, 4), ["gradient"])
    call = agent.request(peer, Kind.CLEANUP_AUTOGRAD, None, UNSET_RPC_TIMEOUT, "a cleanup", ids=(3,))
    with pytest.raises(ValueError, match="no context"):
        agent.wait_for_result(call)
    group.barrier()
    interceptor.register(None)
    group.barrier()
    call = agent.request(peer, Kind.CLEANUP_AUTOGRAD, None, UNSET_RPC_TIMEOUT, "a cleanup", ids=(3,))
    with pytest.raises(MpidistError, match="no autograd is in use"):
        agent.wait_for_result(call)
    group.barrier()
