"""Entries of an allowlist: what cannot be listed raises at once."""

from __future__ import annotations

import functools
import math
import types

import pytest

import mpidist.rpc as rpc
from mpidist import errors
from mpidist.rpc import functions
from mpidist.rpc.names import callee
from mpidist.rpc.names.allowlist import Allowed
from tests.rpc import listed_module as module
from tests.rpc.names.test_allowlist import NAME


@pytest.mark.parametrize(
    "wrong",
    [
        "os.system",
        b"os",
        3,
        None,
        {"os": 1},
        [3],
        [None],
        [object()],
        [functools.partial(print)],
        [math.pi],
        iter([]),
    ],
)
def test_wrong_lists(wrong):
    with pytest.raises(TypeError, match="allowed"):
        Allowed(wrong)


NOWHERE = [
    "nowhere_at_all",
    "nowhere_at_all.function",
    "os.nothing",
    "os.path.join.nothing",
    f"{NAME}.Server.nothing",
    f"{NAME}.step.*",
    f"{NAME}.Server.*",
    "aten::nothing_of_the_kind",
    "nowhere_at_all::*",
    "aten::add.__class__",
    "torch.ops.nowhere_at_all",
    "__torch__.nothing",
    "",
    ".",
    "..",
    "os system",
    "os:system",
    "*",
    ".*",
]


@pytest.mark.parametrize("name", NOWHERE)
def test_names_that_resolve_to_nothing_raise_at_once(name):
    with pytest.raises(ValueError, match="allowed: ") as error:
        Allowed([module.step, name])
    assert f'"{name}"' in str(error.value) or name.startswith("torch.ops")


@pytest.mark.parametrize("name", ["CONSTANT", "ran", "Server.evil", "Server.count"])
def test_data_is_not_listed(name):
    with pytest.raises(TypeError, match="allowed"):
        Allowed([f"{NAME}.{name}"])


def test_functions_that_no_message_can_name_are_not_listed():
    class Local:
        pass

    replaced = types.FunctionType(module.step.__code__, {}, "step")
    replaced.__module__ = NAME
    for item in (lambda: 1, Local, module.Server().get, replaced, [].append):
        with pytest.raises(ValueError, match="not found by a name of its module"):
            Allowed([item])


def test_a_module_without_functions_is_refused():
    with pytest.raises(
        ValueError, match="defines no public function; its classes are listed one by one"
    ):
        Allowed(["collections.abc"])


@pytest.mark.parametrize(
    "item",
    [
        "mpidist",
        "mpidist.*",
        "mpidist.rpc",
        "mpidist.rpc.api",
        "mpidist.rpc.api.shutdown",
        "mpidist.rpc.serving.methods.call_method",
        "mpidist.rpc.rref.RRef",
        "mpidist.optim.local.step",
        "mpidist.optim.local.LocalOptimizer",
        "mpidist.optim.local.LocalOptimizer.add",
        "mpidist.nn.remote",
        "mpidist.nn.RemoteModule",
        f"{NAME}.Proxy",
        f"{NAME}.rpc.shutdown",
        f"{NAME}.rpc.functions.async_execution",
        rpc,
        rpc.shutdown,
        rpc.RRef,
        functions,
        errors.MpidistError,
        callee.wire_name,
    ],
    ids=lambda item: item if type(item) is str else getattr(item, "__name__", type(item).__name__),
)
def test_the_librarys_own_cannot_be_listed(item):
    with pytest.raises(
        ValueError,
        match=r'"mpidist\.optim\.local" \(optimizers\) and "mpidist\.nn\.remote\.execute"',
    ):
        Allowed([item])
