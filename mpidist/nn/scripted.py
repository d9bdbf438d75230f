"""Typed modules that replace handles in ``torch.jit.script``.

TorchScript can call a Python function marked as ignored if the function's types are known. For each
interface this module generates a class whose methods have the interface's types and make the
handle's calls. Compiled modules need a process with Python and cannot be saved.
"""

from __future__ import annotations

import itertools
import linecache
import sys
import types
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

# The prefix mpidist_ avoids clashes with the names of the user's arguments.
_TEXT = """
from typing import *

import torch
from torch import Tensor
from torch.jit import Future


@torch.jit.ignore
def mpidist_call(mpidist_number: int, {parameters}) -> Future[{result}]:
    return mpidist_calls[mpidist_number].function({names})


class Typed(torch.nn.Module):
    __jit_ignored_attributes__ = ["kept"]

    def __init__(self, number, kept):
        super().__init__()
        self.number = number
        self.kept = kept

    def forward(self, {parameters}) -> {result}:
        return mpidist_call(self.number, {names}).wait()

    @torch.jit.export
    def forward_async(self, {parameters}) -> Future[{result}]:
        return mpidist_call(self.number, {names})

    @torch.jit.export
    def __getstate__(self) -> int:
        raise RuntimeError("{refusal}")

    @torch.jit.export
    def __setstate__(self, state: int) -> None:
        raise RuntimeError("{refusal}")
"""
_REFUSAL = (
    "RemoteModule can only be pickled when using RPC, and a compiled one not at all. Passing a "
    "script RemoteModule over RPC is not supported. Send its module_rref, and call "
    "RemoteModule.init_from_module_rref where it arrives."
)


class _Call:
    """The call of one handle, which compiled code refers to by number."""

    def __init__(self, function: Callable[..., torch.futures.Future[Any]]) -> None:
        self.function = function


_calls: WeakValueDictionary[int, _Call] = WeakValueDictionary()
_numbers = itertools.count()
_classes: dict[str, Callable[[int, _Call], nn.Module]] = {}  # by qualified name


def typed(interface: object, forward_async: Callable[..., torch.futures.Future[Any]]) -> nn.Module:
    """Return a module with the types of an interface.

    Args:
        interface: A class decorated by ``torch.jit.interface``.
        forward_async: A function with the arguments of the interface's ``forward`` that returns a
            future.
    """
    name = require_interface(interface)
    kind = _classes.get(name)
    if kind is None:
        kind = _classes[name] = _generated(name)
    call = _Call(forward_async)
    number = next(_numbers)
    _calls[number] = call
    return kind(number, call)


def require_interface(interface: object) -> str:
    """Return the qualified name of an interface.

    Raises:
        ValueError: The class is no interface.
    """
    if not getattr(interface, "__torch_script_interface__", False):
        raise ValueError(
            f"module_interface_cls {interface} must be a type object decorated by "
            "@torch.jit.interface"
        )
    name: str = torch._jit_internal._qualified_name(interface)
    return name


def _generated(name: str) -> Callable[[int, _Call], nn.Module]:
    described = torch.jit._state._python_cu.get_interface(name)
    schema = described.getMethod("forward")
    if schema is None:
        raise ValueError(
            f"Expect forward in interface methods, while it has {described.getMethodNames()}"
        )
    arguments = schema.arguments[1:]
    text = _TEXT.format(
        parameters=", ".join(_parameter(argument) for argument in arguments),
        names=", ".join(argument.name for argument in arguments),
        result=schema.returns[0].type.annotation_str,
        refusal=_REFUSAL,
    )
    # torch compiles the source text, which it looks up by file name.
    file_name = f"<{name}>.py"
    linecache.cache[file_name] = len(text), None, text.splitlines(True), file_name
    module = types.ModuleType(f"mpidist.nn.typed.{name}")
    vars(module)["mpidist_calls"] = _calls
    sys.modules[module.__name__] = module
    exec(compile(text, file_name, "exec", dont_inherit=True), vars(module))
    return vars(module)["Typed"]


def _parameter(argument: torch.Argument) -> str:
    default = f" = {argument.default_value!r}" if argument.has_default_value() else ""
    return f"{argument.name}: {argument.type.annotation_str}{default}"
