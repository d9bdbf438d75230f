"""How a function is named in a message."""

from __future__ import annotations

from typing import Any

import torch

from mpidist.rpc.message import Kind

TO_REMOTE = Kind.REMOTE_PYTHON - Kind.CALL_PYTHON  # from a kind of call to that whose result stays


def target_of(function: Any) -> tuple[int, Any, str]:
    """Say how a function is called: the kind, what names it in the message, and what messages call it.

    Builtin operators of torch and script functions go by their qualified names, all others by pickle.
    """
    name = torch.jit._builtins._find_builtin(function)
    if name is not None:
        return Kind.CALL_BUILTIN, name, name
    if isinstance(function, torch.jit.ScriptFunction):
        name = torch._jit_internal._qualified_name(function)
        return Kind.CALL_SCRIPT, name, name
    if not callable(function):
        raise TypeError(f"function should be callable; got {function!r}")
    return Kind.CALL_PYTHON, function, getattr(function, "__qualname__", None) or repr(function)
