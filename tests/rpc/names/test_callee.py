"""Wire names of functions: a function with a name is resolved from it; others are detected."""

import functools
import operator
import os.path
import sys
import types

import pytest
import torch

from mpidist.errors import MpidistError
from mpidist.rpc.message import COUNT, Kind
from mpidist.rpc.names import callee


class Kept:
    """Functions with nested names."""

    @staticmethod
    def fixed():
        return 1

    @classmethod
    def bound(cls):
        return cls

    def method(self):
        return self


class Heir(Kept):
    """Inherits functions."""


@functools.lru_cache
def cached():
    return 1


def of_this_module():
    return 1


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def name_of(function):
    """Return kind and name, without its length."""
    kind, name = callee.wire_name(function)
    (length,) = COUNT.unpack_from(name)
    assert length == len(name) - COUNT.size
    return kind, name[COUNT.size :].decode()


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.add, "torch.add"),
        (torch.ops.aten.mul, "aten::mul"),
        (torch.ops.aten.add.Tensor, "aten::add.Tensor"),
        (torch.ops._c10d_functional.all_reduce, "_c10d_functional::all_reduce"),
    ],
)
def test_operators_of_torch_go_by_name_and_are_found_by_it(function, name):
    for _ in range(2):  # the second time from what is kept
        assert name_of(function) == (Kind.CALL_BUILTIN, name)
        assert callee.resolve(Kind.CALL_BUILTIN, name.encode()) is function
    assert callee.display_name(callee.wire_name(function)[1]) == name


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (operator.add, "_operator:add"),
        (len, "builtins:len"),
        (dict, "builtins:dict"),
        (Kept, f"{__name__}:Kept"),
        (Kept.fixed, f"{__name__}:Kept.fixed"),
        (Kept.method, f"{__name__}:Kept.method"),
        (cached, f"{__name__}:cached"),
        (of_this_module, f"{__name__}:of_this_module"),
        (os.path.join, "posixpath:join"),
        (torch.ones_like, "torch.ones_like"),
    ],
)
def test_importable_functions_go_by_name_and_are_found_by_it(function, name):
    for _ in range(2):
        kind, text = name_of(function)
        assert text == name and callee.resolve(kind, name.encode()) is function
    assert callee.display_name(callee.wire_name(function)[1]) == name.rpartition(":")[2]


def test_class_methods_go_by_the_name_of_the_class_that_they_are_bound_to():
    for function, name in ((Kept.bound, "Kept.bound"), (Heir.bound, "Heir.bound")):
        assert name_of(function) == (Kind.CALL_PYTHON, f"{__name__}:{name}")
        assert (
            callee.resolve(Kind.CALL_PYTHON, f"{__name__}:{name}".encode())() is function.__self__
        )


def test_functions_without_an_importable_name_go_by_pickle():
    class Local:
        def __call__(self):
            return 1

    made = types.FunctionType(of_this_module.__code__, {}, "of_this_module")
    made.__module__ = __name__  # its name is another function's
    for function in (
        Local,
        Local(),
        lambda: 1,
        made,
        Kept().method,
        operator.itemgetter(1),
        [].append,
    ):
        assert name_of(function) == (Kind.CALL_PYTHON, "")
    assert callee.display_name(callee.wire_name(made)[1]) == ""
    with pytest.raises(TypeError, match="callable; got 3"):
        callee.wire_name(3)


def test_script_functions_go_by_their_qualified_names():
    kind, name = name_of(scripted)
    assert kind == Kind.CALL_SCRIPT and name.endswith("scripted")
    assert callee.resolve(kind, name.encode())(torch.ones(1)).item() == 2
    with pytest.raises(MpidistError, match=r'script function "__torch__[.]nobody" is not defined'):
        callee.resolve(Kind.CALL_SCRIPT, b"__torch__.nobody")


def test_a_replaced_function_is_noticed(monkeypatch):
    module = types.ModuleType("replaced_for_a_test")
    exec("def function(): return 1", module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    first = module.function
    assert name_of(first) == (Kind.CALL_PYTHON, "replaced_for_a_test:function")
    exec("def function(): return 2", module.__dict__)
    assert name_of(first) == (Kind.CALL_PYTHON, "")
    assert name_of(module.function) == (Kind.CALL_PYTHON, "replaced_for_a_test:function")
    assert callee.resolve(Kind.CALL_PYTHON, b"replaced_for_a_test:function")() == 2


def test_modules_are_imported_where_they_are_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert callee.resolve(Kind.CALL_PYTHON, b"colorsys:rgb_to_hsv")(0, 0, 0) == (0, 0, 0)
    for name in (b"nowhere_at_all:function", b"colorsys:nothing", b"colorsys:rgb_to_hsv.nothing"):
        with pytest.raises(
            MpidistError, match="Default RPC pickler does not serialize function code"
        ):
            callee.resolve(Kind.CALL_PYTHON, name)


def test_only_a_limited_number_of_names_is_kept(monkeypatch):
    monkeypatch.setattr(callee, "_MAX_NAMES", 5)
    monkeypatch.setattr(callee, "_wire_names", {})
    monkeypatch.setattr(callee, "_attribute_paths", {})
    for function in (
        len,
        dict,
        list,
        tuple,
        set,
        int,
        str,
        of_this_module,
        operator.add,
        operator.sub,
    ):
        kind, name = name_of(function)
        assert callee.resolve(kind, name.encode()) is function
        assert len(callee._wire_names) <= 5 and len(callee._attribute_paths) <= 5


def test_names_that_resolve_to_nothing_are_not_kept():
    names, operators = dict(callee._attribute_paths), dict(callee._operators)
    for kind, name in (
        (Kind.CALL_PYTHON, b"nowhere_at_all:function"),
        (Kind.CALL_PYTHON, b""),
        (Kind.CALL_PYTHON, b".:x"),
        (Kind.CALL_PYTHON, b"\xff:x"),
        (Kind.CALL_BUILTIN, b"nowhere_at_all::function"),
        (Kind.CALL_BUILTIN, b"\xff"),
    ):
        with pytest.raises(MpidistError):
            callee.resolve(kind, name)
    assert (callee._attribute_paths, callee._operators) == (names, operators)
    assert "nowhere_at_all" not in vars(torch.ops), (
        "torch keeps a namespace of every name that it is asked for"
    )


NO_OPERATORS = [
    "torch.nothing_of_the_kind",
    "torch.Tensor",
    "torch.save",
    "torch.ops",
    "torch.nn.functional",
    "torch.add.__class__",
    "aten::nothing_of_the_kind",
    "aten::add.Nothing",
    "aten::add.__class__",
    "aten::add.op",
    "aten::add.Tensor.op",
    "aten::__init__",
    "aten::__class__",
    "__class__::mro",
    "import_module::__globals__",
    "aten",
    "aten::",
    "",
]


@pytest.mark.parametrize("name", NO_OPERATORS)
def test_what_is_no_operator_of_this_torch_is_named(name):
    with pytest.raises(MpidistError, match=f'operator "{name}" is not known'):
        callee.builtin(name)
