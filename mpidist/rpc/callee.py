"""Names of functions in messages: from a function to its name at the caller, and back at the callee.

A function with an importable name travels as ``module:qualified name``; both sides look it up at
each call, so that a replaced function is noticed. torch's operators and script functions go by
their qualified names. All others have no name and travel in the pickle of their arguments.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch._ops import OpOverload, OpOverloadPacket

from mpidist.errors import FrameError, MpidistError
from mpidist.rpc import services
from mpidist.rpc.message import COUNT, Kind

CACHED_TYPE = type(functools.lru_cache(len))  # a function under ``functools.lru_cache``
# classes and bound class methods have names, too
NAMED_TYPES = (FunctionType, BuiltinFunctionType, CACHED_TYPE)


class Restriction(Protocol):
    """The list of what a worker lets others call."""

    def function(self, kind: int, name: bytes) -> Any:
        """Return a listed function; raise for what is not listed."""


_MOST = 4096  # names kept; a job that makes up more than these starts again
_OPERATOR = re.compile(r"torch\.(\w+)|(\w+)::(\w+)(?:\.(\w+))?", re.ASCII)

# A function's (kind, name with its length, module, attribute), and a name's (module, attribute,
# whether that is a path).
_wire_names: dict[Any, tuple[int, bytes, str, str]] = {}
_attribute_paths: dict[bytes, tuple[str, str, bool]] = {}
_operators: dict[bytes, Any] = {}  # torch's, by name
_methods: dict[str, Method] = {}
UNNAMED = COUNT.pack(0)
_PYTHON, _SERVICE = int(Kind.CALL_PYTHON), int(Kind.CALL_SERVICE)


def wire_name(function: Any) -> tuple[int, bytes]:
    """Return the kind of a call of a function, and its name as a header has it; empty if it must be pickled.

    Raises:
        TypeError: It cannot be called.
    """
    try:
        kind, name, module, attribute = _wire_names[function]
    except (KeyError, TypeError):
        return _find_wire_name(function)
    if module and getattr(sys.modules.get(module), attribute, None) is not function:
        return Kind.CALL_PYTHON, UNNAMED
    return kind, name


class Method:
    """A method of a reference's value, in the place of a function.

    Attributes:
        name: The method's.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


def method(name: str) -> Method:
    """Return what ``wire_name`` takes for a method."""
    made = _methods.get(name)
    if made is None:
        if len(_methods) >= _MOST:
            _methods.clear()
        made = _methods[name] = Method(name)
    return made


def display_name(name: bytes) -> str:
    """Return how messages to users call a function."""
    text = name[COUNT.size :].decode(errors="replace")
    return text.partition(":")[2] or text if ":" in text and "::" not in text else text


def _find_wire_name(function: Any) -> tuple[int, bytes]:
    kind = type(function)
    own_name = getattr(function, "__name__", "")
    module = attribute = ""
    number: int = Kind.CALL_BUILTIN
    if kind is BuiltinFunctionType and getattr(torch, own_name, None) is function:
        name = f"torch.{own_name}"
    elif kind is OpOverloadPacket or kind is OpOverload:
        name = function._qualified_op_name if kind is OpOverloadPacket else function.name()
    elif isinstance(function, torch.jit.ScriptFunction):
        name, number = torch._jit_internal._qualified_name(function), Kind.CALL_SCRIPT
    elif kind is Method:
        name, number = function.name, Kind.CALL_METHOD
    elif kind is FunctionType and function in services.names:
        name, number = services.names[function], Kind.CALL_SERVICE
    else:
        if not callable(function):
            raise TypeError(f"function should be callable; got {function!r}")
        number = Kind.CALL_PYTHON
        module, attribute = module_and_name(function)
        if not is_found_at(function, module, attribute):
            return number, UNNAMED
        name = f"{module}:{attribute}"
    encoded = name.encode()
    encoded = COUNT.pack(len(encoded)) + encoded
    # A nested name (a static method, say) is looked up in full each time.
    if "." not in attribute and number != Kind.CALL_SCRIPT:
        if len(_wire_names) >= _MOST:
            _wire_names.clear()
        _wire_names[function] = int(number), encoded, module, attribute
    return number, encoded


def module_and_name(function: Any) -> tuple[str, str]:
    """Return the module and the qualified name by which a function may be found; empty texts if it has none."""
    owner = function
    suffix = ""
    if type(function) is MethodType and isinstance(function.__self__, type):
        # Of the class it is bound to, which may have inherited it.
        owner, suffix = function.__self__, f".{function.__name__}"
    elif type(function) not in NAMED_TYPES and not isinstance(function, type):
        return "", ""
    module, attribute = getattr(owner, "__module__", None), getattr(owner, "__qualname__", None)
    return (
        (module, attribute + suffix) if type(module) is str and type(attribute) is str else ("", "")
    )


def is_found_at(function: Any, module: str, attribute: str) -> bool:
    """Say whether a function or class is what a module holds under a qualified name; a module that is not loaded has none."""
    try:
        there = _attribute(sys.modules[module], attribute)
    except (KeyError, AttributeError):
        return False
    # A class method is bound anew each time; equal ones have the same function and class.
    return there is function or (
        type(function) is MethodType and type(there) is MethodType and there == function
    )


def _attribute(found: Any, path: str) -> Any:
    for part in path.split("."):
        found = getattr(found, part)
    return found


def resolve(kind: int, name: bytes, allowed: Restriction | None) -> Any:
    """Return the function that a message names.

    Raises:
        MpidistError: There is none here, or it is not in the list of what this worker allows.
    """
    if kind == _SERVICE:
        return services.resolve(_decode_name(name))
    if allowed is not None:
        return allowed.function(kind, name)
    if kind != _PYTHON:
        operator = _operators.get(name)
        return operator if operator is not None else _resolve_operator(kind, name)
    try:
        module, attribute, is_path = _attribute_paths[name]
    except KeyError:
        return _resolve_first(name)
    try:
        function: Any = sys.modules[module]
        return _attribute(function, attribute) if is_path else getattr(function, attribute)
    except (KeyError, AttributeError):
        return _import_function(module, attribute)


def _resolve_first(name: bytes) -> Any:
    module, _, attribute = _decode_name(name).partition(":")
    try:
        function = _attribute(sys.modules[module], attribute)
    except (KeyError, AttributeError):
        function = _import_function(module, attribute)
    # Kept once it is found: others may send any number of names that nothing has.
    if len(_attribute_paths) >= _MOST:
        _attribute_paths.clear()
    _attribute_paths[name] = module, attribute, "." in attribute
    return function


def _import_function(module: str, attribute: str) -> Any:
    try:
        return _attribute(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise MpidistError(
            f"{error}. Default RPC pickler does not serialize function code. "
            f"Ensure that UDFs are defined on both caller and callee modules"
        ) from error


def _resolve_operator(kind: int, encoded: bytes) -> Any:
    name = _decode_name(encoded)
    if kind == Kind.CALL_BUILTIN:
        function = builtin(name)
        if len(_operators) >= _MOST:
            _operators.clear()
        _operators[encoded] = function
        return function
    function = torch.jit._state._python_cu.find_function(name)
    if function is None:
        raise MpidistError(
            f'script function "{name}" is not defined on this worker: define it on both workers'
        )
    return function


def _decode_name(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise FrameError(f"a function's name is no UTF-8: {error}") from error


def builtin(operator_name: str) -> Any:
    """Return the operator that a message names: ``torch.add``, ``aten::add`` or ``aten::add.Tensor``.

    Nothing else that torch's modules and operators have as attributes is found: the types are
    compared.

    Raises:
        MpidistError: There is none here.
    """
    match = _OPERATOR.fullmatch(operator_name)
    found: Any = None
    wanted: type = OpOverloadPacket
    if match is not None:
        function, namespace, name, overload = match.groups()
        if function is not None:
            found, wanted = vars(torch).get(function), BuiltinFunctionType
        elif torch._C._jit_get_operation(f"{namespace}::{name}")[0] is not None:
            # Asked first: torch.ops makes and keeps a namespace of any name.
            found, wanted = getattr(getattr(torch.ops, namespace), name, None), OpOverloadPacket
            if overload is not None and type(found) is wanted:
                found, wanted = getattr(found, overload, None), OpOverload
        found = found if type(found) is wanted else None
    if found is None:
        raise MpidistError(
            f'operator "{operator_name}" is not known to the torch of this worker ({torch.__version__})'
        )
    return found
