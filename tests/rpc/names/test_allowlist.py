"""Allowlist: an index of names, built once; no name leads to an object outside of the index."""

from __future__ import annotations

import builtins
import collections
import math
import operator
import os
import subprocess
import sys
import types
from types import ModuleType

import numpy as np
import pytest
import torch

import mpidist.rpc as rpc
from mpidist import errors
from mpidist.errors import MpidistError
from mpidist.rpc import functions
from mpidist.rpc.message import COUNT, Kind
from mpidist.rpc.names import callee
from mpidist.rpc.names.allowlist import Allowed, Refused
from tests.rpc import listed_module as module

NAME = module.__name__
PYTHON, BUILTIN, SCRIPT = Kind.CALL_PYTHON, Kind.CALL_BUILTIN, Kind.CALL_SCRIPT


@pytest.fixture(autouse=True)
def ran():
    module.ran.clear()
    return module.ran


def called(allowed, function):
    """Return what a caller's function becomes at the callee."""
    kind, name = callee.wire_name(function)
    assert name != callee.UNNAMED, function
    return allowed.function(kind, name[COUNT.size :])


def in_module(allowed):
    """Return the names of the sample module that may be called."""
    prefix = f"{NAME}:"
    return {
        name.decode().removeprefix(prefix)
        for name in allowed._functions
        if name.decode().startswith(prefix)
    }


def refused(call, *args, match="not in the list"):
    with pytest.raises(Refused, match=match) as error:
        call(*args)
    assert (
        isinstance(error.value, MpidistError)
        and len(str(error.value)) < 700
        and "\n" not in str(error.value)
    )


# --- functions
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "item",
    [module.step, f"{NAME}.step", module, NAME, f"{NAME}.*"],
    ids=["function", "its name", "module", "its name again", "starred"],
)
def test_functions_are_listed_by_themselves_by_name_or_by_module(item):
    for kind_of_list in (list, tuple, set, frozenset):
        allowed = Allowed(kind_of_list([item]))
        assert called(allowed, module.step) is module.step
        assert allowed.value(f"{NAME}:step") is module.step
        for other in (
            os.system,
            eval,
            getattr,
            subprocess.run,
            subprocess.Popen,
            torch.load,
            dict,
            module.Server,
            module.Base,
        ):
            refused(called, allowed, other)


def test_a_refusal_says_what_and_where_it_is_allowed():
    with pytest.raises(Refused) as error:
        Allowed([module.step]).function(PYTHON, b"os:system")
    assert str(error.value) == (
        '"os.system" may not be called: it is not in the list of what this worker allows '
        "(init_rpc(..., allowed=[...]))"
    )


def test_a_module_admits_the_public_functions_that_it_defines_itself():
    names = {"step", "apply", "also_step", "cached", "decorated", "later", "make_local", "scripted"}
    assert in_module(Allowed([module])) == names
    allowed = Allowed([module])
    assert called(allowed, module.scripted) is module.scripted
    assert called(allowed, module.cached)(3) == 3
    assert called(allowed, module.decorated) is module.decorated
    for path in (
        "_private",
        "system",
        "getcwd",
        "run",
        "Server",
        "Server.get",
        "CONSTANT",
        "ran",
        "wraps_foreign",
        "os.system",
    ):
        refused(allowed.function, PYTHON, f"{NAME}:{path}".encode())


DOTTED = [
    "",
    ":",
    "step",
    "os.system",
    "os:system",
    "os.system:",
    f"{NAME}:os.system",
    f"{NAME}:step.__globals__",
    f"{NAME}:step.__call__",
    f"{NAME}:step.__class__",
    f"{NAME}:step.",
    f"{NAME}.step",
    f"{NAME}:step\x00",
    f" {NAME}:step",
    f"{NAME}:Server.__init__",
    f"{NAME}:Server.__init__.__globals__",
    f"{NAME}:Server.get",
    f"{NAME}:Server._hidden",
    f"{NAME}:Server.system",
    f"{NAME}:Server.static_system",
    f"{NAME}:Server.class_system",
    f"{NAME}:Server.of_class",
    f"{NAME}:Server.evil",
    f"{NAME}:Server.Nested",
    f"{NAME}:Server.named.__func__",
    f"{NAME}:Server.__class__",
    f"{NAME}:Server.mro",
    f"{NAME}:Server.__subclasses__",
    f"{NAME}:Server.made_by_base",
    f"{NAME}:Heir",
    f"{NAME}:Base",
    "mpidist.rpc.serving.methods:call_method",
    "mpidist.rpc.worker_gather:gather_to_leader",
    "mpidist.comm.serialization.tensor_pickle:_with_attributes",
    "mpidist.rpc.values.pickles:_reference",
    "mpidist.rpc.api:shutdown",
    "mpidist.optim.local:step",
    "mpidist.nn.remote:execute",
    "builtins:eval",
    "builtins:ValueError",
    "x" * 60000,
    "größe:\u202efdp\n",
]


@pytest.mark.parametrize("name", DOTTED, ids=range(len(DOTTED)))
def test_no_other_name_resolves(name, ran):
    allowed = Allowed([module.step, module.Server])
    ran.clear()
    for kind in (PYTHON, BUILTIN, SCRIPT):
        refused(allowed.function, kind, name.encode())
    refused(allowed.value, name)
    assert ran == []


def test_bytes_that_are_no_text_and_other_kinds_are_refused():
    allowed = Allowed([module.step])
    refused(allowed.function, PYTHON, b"\xff\xfe:step")
    named = f"{NAME}:step".encode()
    for kind in (BUILTIN, SCRIPT, Kind.REMOTE_PYTHON, Kind.RREF_FETCH, 0, -1, 1 << 40):
        refused(allowed.function, kind, named)
    for name in (None, 3, named, ["x"], Text(f"{NAME}:step")):
        refused(allowed.value, name)
        refused(allowed.record, name)
        assert allowed.exception(name) is None


class Text(str):
    """Lies about what it begins with, and what it is."""

    __slots__ = ()

    def startswith(self, *args):
        return False

    def __eq__(self, other):
        return True

    def __hash__(self):
        return hash("get")


def test_an_alias_is_found_under_both_names():
    allowed = Allowed(["os.system", "os.path.join", f"{NAME}.getcwd", f"{NAME}.also_step"])
    for name in ("os:system", f"{os.system.__module__}:system"):
        assert allowed.function(PYTHON, name.encode()) is os.system
    assert called(allowed, os.path.join) is os.path.join
    assert called(allowed, os.getcwd) is os.getcwd
    assert called(allowed, module.step) is module.step
    refused(called, allowed, os.path.split)


def test_functions_of_c_modules():
    allowed = Allowed(["math", operator.add, "builtins.len"])
    assert called(allowed, math.sin) is math.sin
    assert called(allowed, operator.add) is operator.add
    assert called(allowed, len) is len
    refused(called, allowed, operator.attrgetter)
    refused(called, allowed, eval)


def test_what_is_replaced_later_stays_as_it_was(monkeypatch):
    step, get, fixed, mul = module.step, module.Server.get, module.Server.fixed, torch.mul
    allowed = Allowed([module.step, module.Server, "torch.mul"])
    monkeypatch.setattr(module, "step", os.system)
    monkeypatch.setattr(module.Server, "get", lambda self: os.system)
    monkeypatch.setattr(module.Server, "fixed", staticmethod(os.system))
    monkeypatch.setattr(module.Server, "added", lambda self: 1, raising=False)
    monkeypatch.setattr(torch, "mul", os.system)
    assert allowed.function(PYTHON, f"{NAME}:step".encode()) is step
    assert allowed.function(PYTHON, f"{NAME}:Server.fixed".encode()) is fixed
    assert allowed.function(BUILTIN, b"torch.mul") is mul
    assert allowed.method(module.Server(3), "get").__func__ is get
    refused(allowed.method, module.Server(), "added", match="added to the class after init_rpc")


def test_functions_of_main(monkeypatch):
    main = types.ModuleType("__main__")
    exec("def step(): return 1\nclass Box:\n    def get(self): return 2\n", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    for items in ([main.step, main.Box], ["__main__.step", "__main__.Box"]):
        allowed = Allowed(items)
        assert allowed.function(PYTHON, b"__main__:step")() == 1
        assert allowed.method(allowed.function(PYTHON, b"__main__:Box")(), "get")() == 2
    assert Allowed(["__main__"]).function(PYTHON, b"__main__:step")() == 1


# --- torch
# --------------------------------------------------------------------------------------------------


def test_operators_are_listed_one_by_one():
    allowed = Allowed(
        [torch.add, "torch.ones_like", "aten::mul", torch.ops.aten.div.Tensor, "torch.ops.aten.sub"]
    )
    assert called(allowed, torch.add) is torch.add
    assert called(allowed, torch.ones_like) is torch.ones_like
    assert called(allowed, torch.ops.aten.mul) is torch.ops.aten.mul
    assert called(allowed, torch.ops.aten.mul.Tensor) is torch.ops.aten.mul.Tensor
    assert called(allowed, torch.ops.aten.div.Tensor) is torch.ops.aten.div.Tensor
    assert called(allowed, torch.ops.aten.sub) is torch.ops.aten.sub
    assert allowed.value("torch.add") is torch.add
    for other in (torch.mul, torch.ops.aten.add, torch.ops.aten.div, torch.ops.aten.div.Scalar):
        refused(called, allowed, other)
    for name in NO_OPERATORS:
        refused(allowed.function, BUILTIN, name.encode())


NO_OPERATORS = [
    "aten::mul.__class__",
    "aten::mul.op",
    "aten::mul.Tensor.op",
    "aten::__init__",
    "aten::",
    "torch.ops",
    "torch.",
    "torch.add.__class__",
    "torch.load",
    "torch.save",
    "torch.hub",
    "torch.classes",
    "torch.import_ir_module",
    "torch.fork",
    "torch.from_file",
    "aten::from_file",
    "aten::from_file.out",
    "aten::save",
    "aten::_print",
    "torch._C",
    "prim::Print",
]


@pytest.mark.parametrize(
    "items",
    [["torch", "aten"], ["torch.*", "aten::*"], [torch, torch.ops.aten]],
    ids=["names", "starred", "objects"],
)
def test_namespaces_of_operators(items):
    allowed = Allowed(items)
    for function in (torch.mul, torch.ops.aten.mul, torch.ops.aten.mul.Tensor, torch.ops.aten.relu):
        assert called(allowed, function) is function
    for name in NO_OPERATORS:
        refused(allowed.function, BUILTIN, name.encode())
    refused(allowed.function, PYTHON, b"torch:load")
    refused(called, Allowed(["torch"]), torch.ops.aten.mul)
    refused(called, Allowed(["aten"]), torch.mul)
    if items[0] == "torch":
        allowed = Allowed(["torch.ops.aten"])
        assert called(allowed, torch.ops.aten.mul) is torch.ops.aten.mul


def test_every_operator_of_a_namespace_is_one():
    allowed = Allowed(["torch", "aten"])
    kinds = {type(allowed.function(BUILTIN, name)) for name in allowed._functions}
    assert kinds == {torch._ops.OpOverload, torch._ops.OpOverloadPacket, types.BuiltinFunctionType}


@pytest.mark.parametrize("by_name", [False, True])
def test_script_functions(by_name):
    kind, name = callee.wire_name(module.scripted)
    text = name[COUNT.size :].decode()
    for item in (text, f"{NAME}.scripted") if by_name else (module.scripted,):
        allowed = Allowed([item])
        assert called(allowed, module.scripted)(torch.ones(1)).item() == 2
        refused(allowed.function, kind, text.replace("scripted", "other").encode())
        refused(allowed.function, BUILTIN, text.encode())


# --- classes
# --------------------------------------------------------------------------------------------------


def test_a_class_admits_its_constructor_and_what_it_defines_for_itself():
    for item in (module.Server, f"{NAME}.Server"):
        allowed = Allowed([item])
        assert in_module(allowed) == {
            "Server",
            "Server.fixed",
            "Server.named",
            "Server.later_static",
        }
        assert called(allowed, module.Server) is module.Server
        assert called(allowed, module.Server.fixed)(1) == ("fixed", 1)
        assert called(allowed, module.Server.named)() is module.Server
        assert hasattr(called(allowed, module.Server.later_static), functions.MARK)
        assert allowed.has_class(module.Server)
        assert not any(
            map(allowed.has_class, (module.Base, module.Heir, int, type, None, "Server"))
        )


def test_public_methods_are_bound_as_python_binds_them(ran):
    server, allowed = module.Server(5), Allowed([module.Server])
    ran.clear()
    results = {
        "get": ((), 5),
        "__call__": ((1,), ("called", 1)),
        "fixed": ((1,), ("fixed", 1)),
        "named": ((), module.Server),
        "without_grad": ((), False),
        "cached": ((), "cached"),
        "twice": ((), ("called", 2)),
        "helper": ((), None),
    }
    bound = {name: allowed.method(server, name) for name in results}
    assert ran == []
    for name, (args, result) in results.items():
        if name != "helper":
            assert bound[name](*args) == result
        assert allowed.has_method(server, name)
    assert bound["helper"].__self__ is server  # a function of the class's own module, in its body
    assert hasattr(allowed.method(server, "later"), functions.MARK)
    assert allowed.method(server, "later")().wait() == 5
    assert hasattr(allowed.method(server, "later_static"), functions.MARK)
    assert allowed.method(server, "by_type")("x") == ("any", "x") and allowed.method(
        server, "by_type"
    )(1) == ("int", 1)


NO_METHODS = {
    "_inner": "public",
    "_Server__secret": "public",
    "_hidden": "public",
    "_": "public",
    "__init__": "public",
    "__class__": "public",
    "__dict__": "public",
    "__reduce_ex__": "public",
    "__getattribute__": "public",
    "__getattr__": "public",
    "__setattr__": "public",
    "evil": "of type property and not a method",
    "cached_evil": "of type cached_property",
    "descriptor": "of type Descriptor",
    "count": "of type int",
    "run": "another module",
    "popen": "another module",
    "system": "of type builtin_function_or_method",
    "static_system": "another module",
    "class_system": "another module",
    "partial_system": "another module",
    "cached_run": "another module",
    "of_class": "another module, or no function",
    "partial": "of type partial",
    "Nested": "of type type",
    "Thread": "of type type",
    "value": "no such method",
    "instance_function": "no such method",
    "anything": "no such method",
    "": "no such method",
    "mro": "no such method",
    "get.__globals__": "no such method",
    "get ": "no such method",
    "inherited": r'inherited from "tests[.]rpc[.]listed_module[.]Base", which is not in the list',
    "made_by_base": "inherited",
}


def test_a_refusal_is_short_and_of_one_line():
    allowed, server = Allowed([module.Server]), module.Server()
    for name in ("_" * 60000, "x" * 60000, "_\n", "\u202e\u2028", "\ud800"):
        refused(allowed.method, server, name, match="may not be called")
        refused(allowed.record, name, match="may not be made")
        refused(allowed.value, name)


@pytest.mark.parametrize("name", NO_METHODS)
def test_all_else_of_an_instance_is_refused_and_does_not_run(name, ran):
    server, allowed = module.Server(5), Allowed([module.Server])
    ran.clear()
    refused(allowed.method, server, name, match=NO_METHODS[name])
    assert not allowed.has_method(server, name)
    assert ran == []


@pytest.mark.parametrize(
    "name", [None, 3, b"get", ("get",), ["get"], Text("get"), Text("_inner"), np.str_("get")]
)
def test_a_method_is_named_by_a_str_of_exact_type(name):
    allowed = Allowed([module.Server])
    refused(allowed.method, module.Server(), name, match="named by a str, not by a")
    assert allowed.has_method(module.Server(), name) is False


def test_values_of_other_classes_have_no_methods(ran):
    allowed = Allowed([module.Server])
    others = [
        module.Heir(),
        module.Base(),
        module.Impostor(),
        module.Claims(),
        [],
        {},
        "text",
        3,
        None,
        module.Server,
    ]
    others += [module.step, module, module.make_local(), allowed, object(), torch.ones(1), type]
    ran.clear()
    for value in others:
        for name in ("get", "own", "append", "__call__", "inherited", "function"):
            refused(allowed.method, value, name, match="the class is not in the list")
            assert not allowed.has_method(value, name)
    assert ran == []


def test_a_class_whose_metaclass_lies_is_listed_by_identity(ran):
    allowed = Allowed([module.Impostor])
    value = module.Impostor()
    ran.clear()
    assert allowed.method(value, "get")() == 1
    refused(allowed.method, module.Server(), "get", match="the class is not in the list")
    assert allowed.has_class(module.Impostor) and not allowed.has_class(module.Server)
    assert "__eq__" not in ran


def test_inherited_methods_belong_to_the_class_that_defines_them():
    heir = module.Heir(5)
    allowed = Allowed([module.Heir])
    assert allowed.method(heir, "own")() == "own"
    refused(allowed.method, heir, "get", match=r'inherited from "tests.rpc.listed_module.Server"')
    allowed = Allowed([module.Heir, module.Server])
    assert allowed.method(heir, "get")() == 5 and allowed.method(module.Server(4), "get")() == 4
    refused(allowed.method, heir, "inherited", match="inherited")
    refused(allowed.method, module.Server(), "own", match="no such method")
    allowed = Allowed([module.Heir, module.Server, module.Base])
    assert allowed.method(heir, "inherited")() == "inherited"
    refused(allowed.method, module.Base(), "get", match="no such method")


def test_one_method_of_a_class():
    allowed = Allowed([module.Heir, f"{NAME}.Server.get"])
    assert (
        allowed.method(module.Heir(5), "get")() == 5
        and allowed.method(module.Server(5), "get")() == 5
    )
    assert allowed.method(module.Heir(5), "own")() == "own"
    refused(allowed.method, module.Server(), "fixed", match="inherited|not in the list")
    assert allowed.value(f"{NAME}:Server.get") is module.Server.get
    assert in_module(allowed) == {"Heir", "Server.get"}
    assert not allowed.has_class(module.Server) and allowed.has_class(module.Heir)
    refused(allowed.function, PYTHON, f"{NAME}:Server".encode())
    refused(allowed.record, f"{NAME}:Server")
    for item in (module.Server.named, f"{NAME}.Server.named"):
        assert called(Allowed([item]), module.Server.named)() is module.Server
    inherited = Allowed([f"{NAME}.Heir.named"])
    assert called(inherited, module.Heir.named)() is module.Heir
    refused(called, inherited, module.Server.named)
    allowed = Allowed([torch.nn.Linear, "torch.nn.Module.__call__"])
    assert allowed.method(torch.nn.Linear(2, 1), "__call__")(torch.ones(2)).shape == (1,)
    refused(allowed.method, torch.nn.Linear(2, 1), "apply", match="inherited")


def test_classes_in_c_and_below_them():
    allowed = Allowed(
        [module.ListWithMethod, "collections.deque", torch.futures.Future, "torch._C.Future"]
    )
    value = module.ListWithMethod([1, 2])
    assert allowed.method(value, "total")() == 3
    refused(allowed.method, value, "append", match='inherited from "builtins.list"')
    assert allowed.has_method(collections.deque(), "append")
    future = torch.futures.Future()
    allowed.method(future, "set_result")(3)
    assert allowed.method(future, "wait")() == 3


def test_a_re_exported_class_stands_under_both_names():
    allowed = Allowed(["torch.nn.Linear"])
    for name in ("torch.nn:Linear", "torch.nn.modules.linear:Linear"):
        assert (
            allowed.function(PYTHON, name.encode()) is torch.nn.Linear
            and allowed.value(name) is torch.nn.Linear
        )


# --- what the data of messages names
# -------------------------------------------------------------------------------------------


def test_records_are_listed_dataclasses_and_named_tuples():
    allowed = Allowed([module.Point, module.Pair, module.Server, module.OfDict, module.step])
    assert (
        allowed.record(f"{NAME}:Point") is module.Point
        and allowed.record(f"{NAME}:Pair") is module.Pair
    )
    for name in ("Frozen", "PairHeir", "PointIn3", "nothing", "step"):
        refused(allowed.record, f"{NAME}:{name}", match="may not be made")
    for name in (f"{NAME}.Point", "Point", "builtins:dict", "mpidist.rpc.worker:WorkerInfo", ""):
        refused(allowed.record, name, match="may not be made")
    for name in ("Server", "OfDict"):
        refused(allowed.record, f"{NAME}:{name}", match="neither a dataclass nor a named tuple")


@pytest.mark.parametrize("name", ["Closing", "ClosingHeir", "ClosingPair"])
def test_instances_of_a_class_with_a_finalizer_are_refused(name, ran):
    """Its constructor and methods are admitted, which run as the class means them."""
    found = getattr(module, name)
    allowed = Allowed([found])
    refused(allowed.record, f"{NAME}:{name}", match="has __del__, which would run with fields")
    assert allowed.value(f"{NAME}:{name}") is found and ran == []


def test_exceptions_are_pythons_own_the_librarys_and_listed_ones():
    allowed = Allowed([module.CustomError, module.Ends, module.Server, module.EqualToPoint])
    assert (
        allowed.exception("builtins:ValueError") is ValueError
        and allowed.exception("builtins:OSError") is OSError
    )
    assert allowed.exception("mpidist.errors:CommTimeout") is errors.CommTimeout
    assert allowed.exception("mpidist.rpc.names.allowlist:Refused") is Refused
    assert allowed.exception(f"{NAME}:CustomError") is module.CustomError
    assert Allowed([]).exception(f"{NAME}:CustomError") is None
    for name in (
        "SystemExit",
        "KeyboardInterrupt",
        "BaseException",
        "GeneratorExit",
        "eval",
        "dict",
        "type",
        "nothing",
    ):
        assert allowed.exception(f"builtins:{name}") is None, name
    for name in (
        f"{NAME}:Ends",
        f"{NAME}:Server",
        f"{NAME}:EqualToPoint",
        "subprocess:CalledProcessError",
        "ValueError",
        "mpidist.errors:Mapping",
        "",
    ):
        assert allowed.exception(name) is None, name
    own = {
        value
        for value in vars(builtins).values()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert all(allowed.exception(f"builtins:{cls.__name__}") is cls for cls in own)


# --- the list itself
# --------------------------------------------------------------------------------------------------


def test_two_entries_admit_the_librarys_services():
    import mpidist.nn.remote as remote
    import mpidist.optim.local as local

    for items in (
        ["mpidist.optim.local", "mpidist.nn.remote.execute"],
        [local, remote.execute],
        ["mpidist.optim.local.*", "math"],
    ):
        assert called(Allowed(items), local.step) is local.step
    allowed = Allowed(["mpidist.optim.local", "mpidist.nn.remote.execute"])
    assert called(allowed, remote.execute) is remote.execute
    refused(called, allowed, remote._create)
    refused(called, allowed, local._copied)
    refused(called, allowed, local.LocalOptimizer)


def test_a_class_of_the_users_below_one_of_the_librarys():
    allowed = Allowed([module.Proxied])
    refused(
        allowed.method,
        object.__new__(module.Proxied),
        "__call__",
        match=r'inherited from "mpidist\.rpc\.rref\.Proxy"',
    )


def test_the_list_does_not_change():
    names = [module.step]
    allowed = Allowed(names)
    before = dict(allowed._functions)
    names.append(os.system)
    for slot in (*Allowed.__slots__, "function", "new"):
        with pytest.raises(AttributeError, match="does not change"):
            setattr(allowed, slot, {})
        with pytest.raises(AttributeError, match="does not change"):
            delattr(allowed, slot)
    for table in (allowed._functions, allowed._classes, allowed._methods, allowed._named_classes):
        with pytest.raises(TypeError):
            table["x"] = 1
    assert not hasattr(allowed, "__dict__") and allowed._functions == before


def test_the_list_as_text():
    allowed = Allowed(
        [module.step, module.Server, "torch.add", torch.ops.aten.mul.Tensor, math, module.scripted]
    )
    entries = ("aten::mul.Tensor", "math", f"{NAME}.Server", f"{NAME}.step", "torch.add")
    assert allowed.entries() == (f"__torch__.{NAME}.scripted", *entries)
    assert repr(Allowed(["os.system", "os.system"])) == "Allowed(['os.system'])"


def test_an_empty_list_admits_nothing_but_data():
    allowed = Allowed([])
    assert allowed.entries() == () and repr(allowed) == "Allowed([])"
    refused(called, allowed, len)
    refused(called, allowed, torch.add)
    refused(allowed.method, [], "append")
    refused(allowed.record, f"{NAME}:Point", match="may not be made")


def test_thousands_of_entries_are_found_by_name():
    made = ModuleType("many_functions_for_a_test")
    sys.modules[made.__name__] = made
    try:
        exec("".join(f"def f{i}(): return {i}\n" for i in range(5000)), made.__dict__)
        many = Allowed([made, "torch", "aten"])
        for i in (0, 2500, 4999):
            assert many.function(PYTHON, f"{made.__name__}:f{i}".encode())() == i
        refused(many.function, PYTHON, f"{made.__name__}:f5000".encode())
    finally:
        del sys.modules[made.__name__]


# --- a worker
# --------------------------------------------------------------------------------------------------


class Runs:
    """A pickle that would run a program."""

    def __reduce__(self):
        return subprocess.call, (["true"],)


@pytest.mark.mpi(min_size=1)
def test_a_worker_refuses_what_is_not_listed(group):
    rpc.init_rpc(
        f"worker{group.rank}", group=group, allowed=[module.step, module.Server, "torch.mul"]
    )
    to = (group.rank + 1) % group.size
    assert rpc.rpc_sync(to, module.step, args=(1,)) == 2
    assert torch.equal(rpc.rpc_sync(to, torch.mul, args=(torch.ones(2), 3)), torch.full((2,), 3.0))
    server = rpc.remote(to, module.Server, args=(5,))
    assert server.rpc_sync().get() == 5
    for call in (
        lambda: rpc.rpc_sync(to, os.getpid),
        lambda: rpc.rpc_sync(to, torch.add, args=(torch.ones(2), 3)),
        lambda: rpc.rpc_sync(to, module.step, args=(Runs(),)),
        lambda: rpc.rpc_sync(to, dict),
        lambda: rpc.rpc_sync(to, lambda: 1),
        lambda: rpc.remote(to, os.getpid).to_here(),
        lambda: server.rpc_sync()._inner(),
        lambda: server.rpc_sync().inherited(),
    ):
        with pytest.raises((MpidistError, TypeError)):
            call()
    assert rpc.rpc_sync(to, module.step, args=(2,)) == 3
    rpc.shutdown()
