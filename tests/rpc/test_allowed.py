"""What others may call here is enforced where names become objects."""

from __future__ import annotations

import collections
import io
import os
import pickle
import subprocess

import pytest
import torch

import mpidist.rpc as rpc
from mpidist.errors import MpidistError
from mpidist.rpc import proxy
from mpidist.rpc.allowed import Allowed, Refused
from tests.rpc.carried import over


def add(x, y=1):
    return x + y


class Box:
    def __init__(self, value=0):
        self.value = value

    def get(self):
        return self.value

    def _inner(self):
        return self.value


def load(allowed, obj):
    return over(obj, unpickler=allowed.unpickler)


class Runs:
    """A pickle that would run a program."""

    def __reduce__(self):
        return subprocess.call, (["true"],)


def test_data_passes_and_other_names_do_not():
    allowed = Allowed([add])
    data = [torch.ones(3), {"a": (1, 2.5, None)}, collections.OrderedDict(x=1), ValueError("x"), torch.float32, b"x", {1}]
    assert len(load(allowed, data)) == len(data)
    assert load(allowed, (add, (1,))) == (add, (1,))
    for evil in (os.system, Runs(), Box(), getattr, eval, pickle.loads, torch.load, torch.hub.load):
        with pytest.raises(Refused, match="not in the list"):
            load(allowed, (evil,))
    # A listed module does not list what it imports.
    name = __name__.encode()
    for dotted in (b"os.system", b"os", b"Box.get.__globals__"):
        crafted = b"\x80\x04\x8c" + bytes([len(name)]) + name + b"\x8c" + bytes([len(dotted)]) + dotted + b"\x93."
        with pytest.raises(Refused, match="leads out of"):
            Allowed([__name__]).unpickler(io.BytesIO(crafted)).load()


@pytest.mark.parametrize("names", [[add], ["tests.rpc.test_allowed.add"], ["tests.rpc.test_allowed"]])
def test_functions_are_listed_by_themselves_by_name_or_by_module(names):
    Allowed(names).require_callable(add)
    with pytest.raises(Refused, match="may not be called"):
        Allowed(names).require_callable(collections.OrderedDict)  # plain data may use it, a call may not


def test_operators_and_methods():
    allowed = Allowed([torch.add, "aten::mul", Box])
    allowed.require_operator("torch.add")
    allowed.require_operator("aten::mul")
    with pytest.raises(Refused, match=r"torch\.mul"):
        allowed.require_operator("torch.mul")
    Allowed(["torch"]).require_operator("torch.mul")
    allowed.require_method(Box(), "get")
    with pytest.raises(Refused, match="public"):
        allowed.require_method(Box(), "_inner")
    with pytest.raises(Refused, match="not in the list"):
        allowed.require_method([], "append")
    allowed.require_callable(proxy.call_method)


@pytest.mark.parametrize("wrong", ["os.system", 3, [3], [object()]])
def test_wrong_lists(wrong):
    with pytest.raises(TypeError, match="allowed"):
        Allowed(wrong)


@pytest.mark.mpi(min_size=1)
def test_a_worker_refuses_what_is_not_listed(group):
    rpc.init_rpc(f"worker{group.rank}", group=group, allowed=[add, Box, "torch.mul"])
    to = (group.rank + 1) % group.size
    assert rpc.rpc_sync(to, add, args=(1,)) == 2
    assert torch.equal(rpc.rpc_sync(to, torch.mul, args=(torch.ones(2), 3)), torch.full((2,), 3.0))
    box = rpc.remote(to, Box, args=(5,))
    assert box.rpc_sync().get() == 5 and box.to_here().value == 5
    for call in (
        lambda: rpc.rpc_sync(to, os.getpid),
        lambda: rpc.rpc_sync(to, torch.add, args=(torch.ones(2), 3)),
        lambda: rpc.rpc_sync(to, add, args=(Runs(),)),
        lambda: rpc.rpc_sync(to, dict),
        lambda: rpc.rpc_sync(to, lambda: 1),
        lambda: rpc.remote(to, os.getpid).to_here(),
        lambda: box.rpc_sync()._inner(),
    ):
        with pytest.raises(MpidistError, match=r"not in the list|may not be called"):
            call()
    assert rpc.rpc_sync(to, add, args=(2,)) == 3
    rpc.shutdown()
