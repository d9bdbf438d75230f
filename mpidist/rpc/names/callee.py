"""Wire names of functions: the caller encodes a function as a name, the callee resolves the name.

A function with an importable name is sent as ``module:qualified name``. Both sides look the name up
at each call, so that a replaced function is found. torch's operators and script functions are sent
by their qualified names. All other functions have no name and are pickled with their arguments.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload, OpOverloadPacket

from mpidist.errors import FrameError, MpidistError
from mpidist.rpc.message import COUNT, Kind
from mpidist.rpc.names import services

CACHED_TYPE = type(functools.lru_cache(len))  # of a function with ``functools.lru_cache``

# Types of functions that have names. Classes and bound class methods have names as well.
NAMED_TYPES = (FunctionType, BuiltinFunctionType, CACHED_TYPE)


Function: TypeAlias = Callable[..., object]

_MAX_NAMES = 4096  # per cache; a full cache is cleared
_OPERATOR = re.compile(r"torch\.(\w+)|(\w+)::(\w+)(?:\.(\w+))?", re.ASCII)

# Caches. By function: (kind, wire name, module, attribute). By name: (module, attribute, whether
# the attribute is a dotted path).
_wire_names: dict[object, tuple[int, bytes, str, str]] = {}
_attribute_paths: dict[bytes, tuple[str, str, bool]] = {}
_operators: dict[bytes, Function] = {}
_methods: dict[str, Method] = {}
UNNAMED = COUNT.pack(0)
_PYTHON, _SERVICE = int(Kind.CALL_PYTHON), int(Kind.CALL_SERVICE)


def wire_name(function: object) -> tuple[int, bytes]:
    """Return the kind of a function's call, and its name for the header.

    Returns:
        The kind, and the name with its length; ``UNNAMED`` if the function must be pickled.

    Raises:
        TypeError: The object cannot be called.
    """
    try:
        kind, name, module, attribute = _wire_names[function]
    except (KeyError, TypeError):
        return _find_wire_name(function)
    if module and getattr(sys.modules.get(module), attribute, None) is not function:
        return Kind.CALL_PYTHON, UNNAMED
    return kind, name


class Method:
    """A method of a referenced value, in place of a function.

    Attributes:
        name: The name of the method.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


def method(name: str) -> Method:
    """Return the argument of ``wire_name`` for a method."""
    found = _methods.get(name)
    if found is None:
        if len(_methods) >= _MAX_NAMES:
            _methods.clear()
        found = _methods[name] = Method(name)
    return found


def display_name(name: bytes) -> str:
    """Return the name of a function for messages to users."""
    return title(name[COUNT.size :])


def title(name: bytes) -> str:
    """Return the same of a name without its length."""
    text = name.decode(errors="replace")
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
    # A nested name (of a static method, for example) is looked up in full each time.
    if "." not in attribute and number != Kind.CALL_SCRIPT:
        if len(_wire_names) >= _MAX_NAMES:
            _wire_names.clear()
        _wire_names[function] = int(number), encoded, module, attribute
    return number, encoded


def module_and_name(function: object) -> tuple[str, str]:
    """Return the module and qualified name of a function; empty strings if it has none."""
    owner = function
    suffix = ""
    if type(function) is MethodType and isinstance(function.__self__, type):
        # The class that the method is bound to may have inherited it.
        owner, suffix = function.__self__, f".{function.__name__}"
    elif type(function) not in NAMED_TYPES and not isinstance(function, type):
        return "", ""
    module, attribute = getattr(owner, "__module__", None), getattr(owner, "__qualname__", None)
    return (
        (module, attribute + suffix) if type(module) is str and type(attribute) is str else ("", "")
    )


def is_found_at(function: object, module: str, attribute: str) -> bool:
    """Return whether a loaded module has this function or class under a qualified name."""
    try:
        there = _attribute(sys.modules[module], attribute)
    except (KeyError, AttributeError):
        return False
    # Each access binds a class method anew; bound methods are equal if function and class are.
    return there is function or (
        type(function) is MethodType and type(there) is MethodType and there == function
    )


def _attribute(found: object, path: str) -> Any:
    for part in path.split("."):
        found = getattr(found, part)
    return found


def resolve(kind: int, name: bytes) -> Function:
    """Return the function of a name in a message.

    Raises:
        MpidistError: There is no such function here.
    """
    if kind == _SERVICE:
        return services.resolve(_decode_name(name))
    if kind != _PYTHON:
        operator = _operators.get(name)
        return operator if operator is not None else _resolve_operator(kind, name)
    try:
        module, attribute, is_path = _attribute_paths[name]
    except KeyError:
        return _resolve_first(name)
    try:
        found = sys.modules[module]
        return _attribute(found, attribute) if is_path else getattr(found, attribute)
    except (KeyError, AttributeError):
        return _import_function(module, attribute)


def _resolve_first(name: bytes) -> Function:
    module, _, attribute = _decode_name(name).partition(":")
    try:
        function = _attribute(sys.modules[module], attribute)
    except (KeyError, AttributeError):
        function = _import_function(module, attribute)
    # Cached only once it is found: a peer may send any number of names that do not exist.
    if len(_attribute_paths) >= _MAX_NAMES:
        _attribute_paths.clear()
    _attribute_paths[name] = module, attribute, "." in attribute
    return function


def _import_function(module: str, attribute: str) -> Function:
    try:
        return _attribute(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise MpidistError(
            f"{error}. Default RPC pickler does not serialize function code. "
            f"Ensure that UDFs are defined on both caller and callee modules"
        ) from error


def _resolve_operator(kind: int, encoded: bytes) -> Function:
    name = _decode_name(encoded)
    if kind == Kind.CALL_BUILTIN:
        function = builtin(name)
        if len(_operators) >= _MAX_NAMES:
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


def builtin(operator_name: str) -> Function:
    """Return the operator of a name: ``torch.add``, ``aten::add`` or ``aten::add.Tensor``.

    Other attributes of torch's modules and operators are rejected by their type.

    Raises:
        MpidistError: There is no such operator here.
    """
    match = _OPERATOR.fullmatch(operator_name)
    found: Any = None
    wanted: type = OpOverloadPacket
    if match is not None:
        function, namespace, name, overload = match.groups()
        if function is not None:
            found, wanted = vars(torch).get(function), BuiltinFunctionType
        elif torch._C._jit_get_operation(f"{namespace}::{name}")[0] is not None:
            # Checked first, because torch.ops creates and keeps a namespace for any name.
            found, wanted = getattr(getattr(torch.ops, namespace), name, None), OpOverloadPacket
            if overload is not None and type(found) is wanted:
                found, wanted = getattr(found, overload, None), OpOverload
        found = found if type(found) is wanted else None
    if found is None:
        raise MpidistError(
            f'operator "{operator_name}" is not known to the torch of this worker '
            f"({torch.__version__})"
        )
    return found
