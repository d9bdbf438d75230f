"""How a function is named in a message."""

from __future__ import annotations

from types import BuiltinFunctionType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from mpidist.errors import MpidistError
from mpidist.rpc.message import Kind

TO_REMOTE = Kind.REMOTE_PYTHON - Kind.CALL_PYTHON  # from a kind of call to that whose result stays


def target_of(function: Any) -> tuple[int, Any, str]:
    """Say how a function is called: the kind, what names it in the message, and what messages call it.

    Builtin operators of torch and script functions go by their qualified names, all others by pickle.
    """
    kind = type(function)
    own_name = getattr(function, "__name__", "")
    if kind is BuiltinFunctionType and getattr(torch, own_name, None) is function:
        name: Any = f"torch.{own_name}"
        return Kind.CALL_BUILTIN, name, name
    if kind is OpOverloadPacket or kind is OpOverload:
        name = function._qualified_op_name if kind is OpOverloadPacket else function.name()
        return Kind.CALL_BUILTIN, name, name
    if isinstance(function, torch.jit.ScriptFunction):
        name = torch._jit_internal._qualified_name(function)
        return Kind.CALL_SCRIPT, name, name
    if not callable(function):
        raise TypeError(f"function should be callable; got {function!r}")
    return Kind.CALL_PYTHON, function, getattr(function, "__qualname__", None) or repr(function)


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
