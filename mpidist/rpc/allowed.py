"""Allowlist of what other workers may call here: ``init_rpc(..., allowed=[...])``.

A pickle names the classes and functions that rebuild it, and may call any of them. So the list is enforced where names become
objects: an unpickler that knows the listed names, and what plain data needs, and refuses all others.

This guards against mistakes, not against a hostile worker: a crafted pickle still runs arbitrary code (SECURITY.md).
"""

from __future__ import annotations

import builtins
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from mpidist.comm import tensor_pickle
from mpidist.errors import MpidistError
from mpidist.rpc import callee
from mpidist.rpc.message import Kind

_SAFE_BUILTINS = {
    name for name in dir(builtins) if isinstance(getattr(builtins, name), type) and issubclass(getattr(builtins, name), Exception)
} | {
    "bool",
    "bytearray",
    "bytes",
    "complex",
    "dict",
    "float",
    "frozenset",
    "int",
    "list",
    "range",
    "set",
    "slice",
    "str",
    "tuple",
}
# What calls of this library itself name.
_OWN_CALLS = {
    "mpidist.rpc.proxy": {"call_method", "type_of", "has_attribute"},
    "mpidist.rpc.gathering": {"_gather_to_leader", "_broadcast_to_followers"},
}
_SAFE = {
    "builtins": _SAFE_BUILTINS,
    "collections": {"OrderedDict", "defaultdict", "deque"},
    "torch": {"Size", "device", "Tensor"} | {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)},
    "torch._utils": {"_rebuild_parameter", "_rebuild_parameter_with_state"},
    "numpy": {"dtype", "ndarray"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.numeric": {"_frombuffer"},
    "numpy._core.numeric": {"_frombuffer"},
    "mpidist.rpc.worker": {"WorkerInfo"},
    "mpidist.rpc.pickles": {"_reference"},
    "mpidist.nn.remote_module": {"from_wire"},
    "mpidist.comm.tensor_pickle": {function.__name__ for function in tensor_pickle.REBUILDERS},
    **_OWN_CALLS,
    "mpidist.errors": {"MpidistError", "CommTimeout", "RankFailureError", "RemoteError", "RRefError", "FrameError"},
}


class Refused(MpidistError, pickle.UnpicklingError):
    """A message names what this worker does not allow."""


class Allowed:
    """The list of one worker; it does not hold against a hostile one.

    Args:
        names: ``"package.module"`` for all that is defined there, ``"package.module.name"`` for one function or class,
            ``"torch.add"`` for an operator of torch; or functions, classes and modules themselves.
    """

    def __init__(self, names: Sequence[Any]) -> None:
        if isinstance(names, str) or not isinstance(names, (list, tuple, set, frozenset)):
            raise TypeError(f"allowed is a list of names, functions, classes or modules; got {names!r}")
        self.names = frozenset(_name_of(item) for item in names)
        allowed = self

        class Unpickler(pickle.Unpickler):
            """Reads what the list and plain data need."""

            def find_class(self, module: str, name: str) -> Any:
                allowed.require(module, name)
                found = super().find_class(module, name)
                # What a listed module imports is not listed with it.
                if name not in _SAFE.get(module, ()) and getattr(found, "__module__", None) != module:
                    raise Refused(f'"{module}.{name}" leads out of {module}, and is not in the list of what this worker allows')
                return found

        self.unpickler = Unpickler

    def require(self, module: str, name: str) -> None:
        """Refuse a name that a pickle refers to.

        Raises:
            Refused: It is neither listed nor plain data.
        """
        if name not in _SAFE.get(module, ()) and not self._lists(module, name):
            raise Refused(f'"{module}.{name}" is not in the list of what this worker allows (init_rpc(..., allowed=[...]))')

    def require_function(self, module: str, attribute: str) -> None:
        """Refuse the name of a function before it is looked up."""
        if attribute not in _OWN_CALLS.get(module, ()) and not self._lists(module, attribute):
            raise Refused(
                f'"{module}.{attribute}" may not be called: it is not in the list of what this worker allows '
                "(init_rpc(..., allowed=[...]))"
            )

    def require_callable(self, function: Any) -> None:
        """Refuse a function that only plain data may use."""
        module, name = getattr(function, "__module__", "") or "", getattr(function, "__qualname__", "") or ""
        if not module.startswith("mpidist.rpc.") and not self._lists(module, name):
            raise Refused(f'"{module}.{name}" may not be called: it is not in the list of what this worker allows')

    def require_operator(self, qualified_name: str) -> None:
        """Refuse an operator or a script function by its qualified name."""
        namespace = qualified_name.split("::")[0]
        plain = qualified_name.removeprefix("__torch__.").rpartition(".")
        if qualified_name not in self.names and namespace not in self.names and not self._lists(plain[0], plain[2]):
            raise Refused(f'"{qualified_name}" may not be called: it is not in the list of what this worker allows')

    def require_method(self, value: Any, name: str) -> None:
        """Refuse a method of a referenced value: of a class that is not listed, or one that Python keeps for itself."""
        kind = type(value)
        if name.startswith("_") and name != "__call__":
            raise Refused(f"method {name!r} may not be called: this worker allows public methods only")
        if not self._lists(kind.__module__, kind.__qualname__):
            raise Refused(f'methods of "{kind.__module__}.{kind.__qualname__}" may not be called: the class is not in the list')

    def _lists(self, module: str, name: str) -> bool:
        parts = name.split(".")
        return module in self.names or any(".".join((module, *parts[:count])) in self.names for count in range(1, len(parts) + 1))


def _name_of(item: Any) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, type(pickle)):
        return item.__name__
    kind, named = callee.named(item) if callable(item) else (Kind.CALL_PYTHON, b"")
    if kind != Kind.CALL_PYTHON:
        return callee.text_of(named).removeprefix("__torch__.")
    module, name = getattr(item, "__module__", None), getattr(item, "__qualname__", None)
    if not module or not name:
        raise TypeError(f"allowed names functions, classes and modules; got {item!r}")
    return f"{module}.{name}"
