"""Allowlist: what each item admits, and refusals of all other names, kinds and methods."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys

import pytest
import torch

import mpidist.rpc as rpc
from mpidist.errors import MpidistError
from mpidist.rpc.message import COUNT, Kind
from mpidist.rpc.names import callee
from mpidist.rpc.names.allowlist import Allowed, Refused

PYTHON, BUILTIN, SCRIPT = int(Kind.CALL_PYTHON), int(Kind.CALL_BUILTIN), int(Kind.CALL_SCRIPT)
CONSTANT = 5
ran = []  # code of a class that no look-up may run


def step(x, y=1):
    return x + y


@functools.lru_cache
def cached(x):
    return x


@functools.wraps(os.system)
def wraps_foreign(command):
    return command


def _private():
    return 1


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class Base:
    def inherited(self):
        return "inherited"


class Server(Base):
    value = 3

    def __init__(self, value):
        self.own = value

    def get(self):
        return self.own

    def __call__(self, x):
        return self.own + x

    def _inner(self):
        return 1

    @staticmethod
    def double(x):
        return 2 * x

    @classmethod
    def named(cls):
        return cls.__name__

    @property
    def price(self):
        ran.append("price")

    @functools.cached_property
    def cost(self):
        ran.append("cost")

    def __getattr__(self, name):
        ran.append(name)
        raise AttributeError(name)

    partly = functools.partialmethod(__call__, 4)


class Heir(Server):
    def new(self):
        return "new"


def called(allowed, function):
    kind, name = callee.wire_name(function)
    return allowed.function(int(kind), name[COUNT.size :])


def refused(look_up, *arguments, match="may not be (called|named)"):
    with pytest.raises(Refused, match=match) as error:
        look_up(*arguments)
    assert len(str(error.value)) < 700 and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "item",
    [step, f"{__name__}.step", sys.modules[__name__], __name__],
    ids=["function", "its name", "module", "its name again"],
)
@pytest.mark.parametrize("kind_of_list", [list, tuple, set, frozenset])
def test_functions_are_listed_by_themselves_by_name_or_by_module(item, kind_of_list):
    allowed = Allowed(kind_of_list([item]))
    assert called(allowed, step) is step and allowed.value(f"{__name__}:step") is step
    for other in (os.system, eval, getattr, subprocess.run, torch.load, dict, Server, _private):
        refused(called, allowed, other)
    for path in ("_private", "CONSTANT", "ran", "wraps_foreign", "os.system", "step.__globals__"):
        refused(allowed.function, PYTHON, f"{__name__}:{path}".encode())
        refused(allowed.value, f"{__name__}:{path}")


def test_a_refusal_says_what_and_where_it_is_allowed():
    with pytest.raises(Refused) as error:
        Allowed([step]).function(PYTHON, b"os:system")
    assert str(error.value) == (
        '"os.system" may not be called: it is not in the list of what this worker allows '
        "(init_rpc(..., allowed=[...]))"
    )
    for name in ("a" * 10_000, "line\nline", "\x1b[31m", "\udc80"):
        refused(Allowed([]).value, name)
        refused(Allowed([Server]).method, Server(1), name)


def test_operators_and_script_functions():
    allowed = Allowed([torch.add, "torch.mul", "aten::sub", torch.ops.aten.div.Tensor, scripted])
    for function in (torch.add, torch.mul, torch.ops.aten.sub, torch.ops.aten.div.Tensor, scripted):
        assert called(allowed, function) is function
    for other in (torch.ops.aten.add, torch.ops.aten.div, torch.from_file):
        refused(called, allowed, other)
    refused(allowed.function, PYTHON, b"torch.add")
    refused(allowed.function, SCRIPT, b"aten::sub")
    refused(allowed.function, BUILTIN, f"{__name__}:step".encode())


def test_what_is_replaced_later_stays_as_it_was(monkeypatch):
    allowed, before = Allowed([step]), step
    monkeypatch.setattr(sys.modules[__name__], "step", os.system)
    assert allowed.function(PYTHON, f"{__name__}:step".encode()) is before


def test_a_class_admits_its_constructor_and_the_methods_that_it_defines():
    allowed, server = Allowed([Server]), Server(7)
    assert called(allowed, Server) is Server and allowed.has_class(Server)
    assert called(allowed, Server.double)(2) == 4 and called(allowed, Server.named)() == "Server"
    assert allowed.method(server, "get")() == 7 and allowed.method(server, "__call__")(1) == 8
    assert allowed.method(server, "double")(2) == 4 and allowed.method(server, "partly")() == 11
    assert allowed.method(server, "named")() == "Server"
    for name in ("_inner", "inherited", "price", "cost", "value", "own", "nothing", "", "get.x"):
        refused(allowed.method, server, name, match="no public method that a class in the list")
    for name in ("__init__", "__class__", "__dict__", "__getattr__", "__reduce__"):
        refused(allowed.method, server, name, match="may not be called")
        refused(allowed.function, PYTHON, f"{__name__}:Server.{name}".encode())
    for value in (Base(), Heir(1), [], torch.ones(1), Server):
        refused(allowed.method, value, "get", match="the class is not in the list")
    assert ran == []


def test_inherited_methods_belong_to_the_class_that_defines_them():
    refused(Allowed([Heir]).method, Heir(1), "get", match="may not be called")
    allowed = Allowed([Heir, Server])
    assert allowed.method(Heir(1), "get")() == 1 and allowed.method(Heir(1), "new")() == "new"
    refused(allowed.method, Heir(1), "inherited")


def test_classes_in_c():
    allowed = Allowed([dict])
    assert allowed.method({1: 2}, "get")(1) == 2
    refused(allowed.method, {}, "__setitem__")


@pytest.mark.parametrize(
    ("items", "error", "words"),
    [
        ("os.system", TypeError, "is a list of names"),
        (step, TypeError, "is a list of names"),
        ([3], TypeError, "names functions, classes and modules"),
        ([lambda: 1], ValueError, "no message can name it"),
        ([functools.partial(step, 1)], ValueError, "no message can name it"),
        (["no.such.function"], ValueError, "leads nowhere"),
        ([f"{__name__}.nothing"], ValueError, "leads nowhere"),
        (["os system"], ValueError, "leads nowhere"),
        (["aten::no_such_operator"], ValueError, "leads nowhere"),
        ([f"{__name__}.CONSTANT"], TypeError, "names functions, classes and modules"),
        (["tests.rpc"], ValueError, "defines no public function"),
    ],
)
def test_items_that_no_message_can_name(items, error, words):
    with pytest.raises(error, match=words):
        Allowed(items)


def test_an_empty_list_admits_nothing_but_data():
    allowed = Allowed([])
    refused(called, allowed, len)
    refused(called, allowed, torch.add)
    refused(allowed.method, [], "append", match="the class is not in the list")


def test_the_entries_of_optimizers_and_remote_modules():
    import mpidist.nn.remote as remote
    import mpidist.optim.local as local

    allowed = Allowed(["mpidist.optim.local", "mpidist.nn.remote.execute", math.sqrt])
    for function in (local.make, local.step, local.load_state, remote.execute, math.sqrt):
        assert called(allowed, function) is function
    for other in (remote._create, local._copied, local.LocalOptimizer, math.sin):
        refused(called, allowed, other)


class Runs:
    """A pickle that would run a program."""

    def __reduce__(self):
        return subprocess.call, (["true"],)


@pytest.mark.mpi(min_size=1)
def test_a_worker_refuses_what_is_not_listed(group):
    rpc.init_rpc(f"worker{group.rank}", group=group, allowed=[step, Server, "torch.mul"])
    to = (group.rank + 1) % group.size
    assert rpc.rpc_sync(to, step, args=(1,)) == 2
    assert torch.equal(rpc.rpc_sync(to, torch.mul, args=(torch.ones(2), 3)), torch.full((2,), 3.0))
    server = rpc.remote(to, Server, args=(5,))
    assert server.rpc_sync().get() == 5
    for call in (
        lambda: rpc.rpc_sync(to, os.getpid),
        lambda: rpc.rpc_sync(to, torch.add, args=(torch.ones(2), 3)),
        lambda: rpc.rpc_sync(to, step, args=(Runs(),)),
        lambda: rpc.rpc_sync(to, dict),
        lambda: rpc.rpc_sync(to, lambda: 1),
        lambda: rpc.remote(to, os.getpid).to_here(),
        lambda: server.rpc_sync()._inner(),
        lambda: server.rpc_sync().inherited(),
    ):
        with pytest.raises((MpidistError, TypeError)):
            call()
    assert rpc.rpc_sync(to, step, args=(2,)) == 3
    rpc.shutdown()
