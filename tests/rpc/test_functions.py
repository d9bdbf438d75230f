"""Asynchronous functions: the answer follows when their future completes."""

from __future__ import annotations

import pytest
import torch

import mpidist.rpc as rpc

pytestmark = pytest.mark.mpi(min_size=1)


def echo(value):
    return value


def add_later(to, x, y, z):
    return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda future: future.wait() + z)


later = rpc.functions.async_execution(add_later)


def test_functions_that_answer_later(workers, to):
    one = torch.ones(2)
    assert torch.equal(rpc.rpc_sync(to, later, args=(to, one, one, 1)), one * 3)
    assert torch.equal(rpc.remote(to, later, args=(to, one, one, 1)).to_here(), one * 3)
    with pytest.raises(RuntimeError, match=r"must return a torch\.futures\.Future"):
        rpc.rpc_sync(to, rpc.functions.async_execution(echo), args=(3,))
