"""Names of functions in messages: from a function to its name at the caller, and back at the callee.

A function with an importable name travels as ``module:qualified name``; both sides look it up at
each call, so that a replaced function is noticed. torch's operators and script functions go by
their qualified names. All others have no name and travel in the pickle of their arguments.
"""

from __future__ import annotations

import importlib
import sys
from types import BuiltinFunctionType, FunctionType
from typing import Any, Protocol

import torch
from torch._ops import OpOverload, OpOverloadPacket

from mpidist.errors import MpidistError
from mpidist.rpc import services
from mpidist.rpc.message import COUNT, Kind


class Restriction(Protocol):
    """The list of what a worker lets others call; each method raises for what is not in it."""

    def require_function(self, module: str, attribute: str) -> None:
        """Check a function's name, before it is looked up."""

    def require_callable(self, function: Any) -> None:
        """Check a function."""

    def require_operator(self, qualified_name: str) -> None:
        """Check an operator or a script function."""


_MOST = 4096  # names kept; a job that makes up more than these starts again

# A function's (kind, name with its length, module, attribute), and a name's (module, attribute, whether that is a path).
_of_functions: dict[Any, tuple[int, bytes, str, str]] = {}
_of_names: dict[bytes, tuple[str, str, bool]] = {}
_operators: dict[bytes, Any] = {}  # torch's, by name
_methods: dict[str, Method] = {}
_UNNAMED = COUNT.pack(0)
_PYTHON, _SERVICE = int(Kind.CALL_PYTHON), int(Kind.CALL_SERVICE)


def named(function: Any) -> tuple[int, bytes]:
    """Return the kind of a call of a function, and its name as a header has it; empty if it must be pickled.

    Raises:
        TypeError: It cannot be called.
    """
    try:
        kind, name, module, attribute = _of_functions[function]
    except (KeyError, TypeError):
        return _look_up(function)
    if module and getattr(sys.modules.get(module), attribute, None) is not function:
        return Kind.CALL_PYTHON, _UNNAMED
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
    """Return what ``named`` takes for a method."""
    made = _methods.get(name)
    if made is None:
        if len(_methods) >= _MOST:
            _methods.clear()
        made = _methods[name] = Method(name)
    return made


def text_of(name: bytes) -> str:
    """Return how messages to users call a function."""
    text = name[COUNT.size :].decode(errors="replace")
    return text.partition(":")[2] or text if ":" in text and "::" not in text else text


def _look_up(function: Any) -> tuple[int, bytes]:
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
        module, attribute = getattr(function, "__module__", None) or "", getattr(function, "__qualname__", None) or ""
        if kind not in (FunctionType, BuiltinFunctionType) and not isinstance(function, type):
            return number, _UNNAMED
        if not _is_at(function, module, attribute):
            return number, _UNNAMED
        name = f"{module}:{attribute}"
    encoded = name.encode()
    encoded = COUNT.pack(len(encoded)) + encoded
    # A nested name (a static method, say) is looked up in full each time.
    if "." not in attribute and number != Kind.CALL_SCRIPT:
        if len(_of_functions) >= _MOST:
            _of_functions.clear()
        _of_functions[function] = int(number), encoded, module, attribute
    return number, encoded


def _is_at(function: Any, module: str, attribute: str) -> bool:
    try:
        return _attribute(sys.modules[module], attribute) is function
    except (KeyError, AttributeError):
        return False


def _attribute(found: Any, path: str) -> Any:
    for part in path.split("."):
        found = getattr(found, part)
    return found


def found(kind: int, name: bytes, allowed: Restriction | None) -> Any:
    """Return the function that a message names.

    Raises:
        MpidistError: There is none here, or it is not in the list of what this worker allows.
    """
    if kind == _SERVICE:
        return services.found(name.decode())
    if kind != _PYTHON:
        operator = _operators.get(name) if allowed is None else None
        return operator if operator is not None else _operator(kind, name, allowed)
    try:
        module, attribute, is_path = _of_names[name]
    except KeyError:
        module, _, attribute = name.decode().partition(":")
        is_path = "." in attribute
        if len(_of_names) >= _MOST:
            _of_names.clear()
        _of_names[name] = module, attribute, is_path
    if allowed is not None:
        allowed.require_function(module, attribute)
    try:
        function: Any = sys.modules[module]
        function = _attribute(function, attribute) if is_path else getattr(function, attribute)
    except (KeyError, AttributeError):
        function = _imported(module, attribute)
    if allowed is not None:
        allowed.require_callable(function)
    return function


def _imported(module: str, attribute: str) -> Any:
    try:
        return _attribute(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise MpidistError(
            f"{error}. Default RPC pickler does not serialize function code. "
            f"Ensure that UDFs are defined on both caller and callee modules"
        ) from error


def _operator(kind: int, encoded: bytes, allowed: Restriction | None) -> Any:
    name = encoded.decode()
    if allowed is not None:
        allowed.require_operator(name)
    if kind == Kind.CALL_BUILTIN:
        if len(_operators) >= _MOST:
            _operators.clear()
        function = _operators[encoded] = builtin(name)
        return function
    function = torch.jit._state._python_cu.find_function(name)
    if function is None:
        raise MpidistError(f'script function "{name}" is not defined on this worker: define it on both workers')
    return function


def builtin(named: str) -> Any:
    """Return the operator that a message names: ``torch.add``, ``aten::add`` or ``aten::add.Tensor``.

    Raises:
        MpidistError: There is none here.
    """
    if named.startswith("torch."):
        found = getattr(torch, named.removeprefix("torch."), None)
        found = found if type(found) is BuiltinFunctionType else None
    else:
        namespace, _, name = named.partition("::")
        name, _, overload = name.partition(".")
        found = getattr(getattr(torch.ops, namespace), name, None)
        found = getattr(found, overload, None) if overload else found
    if found is None:
        raise MpidistError(f'operator "{named}" is not known to the torch of this worker ({torch.__version__})')
    return found
