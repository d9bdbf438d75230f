"""Marks that keep torch.compile out of our Python code.

Dynamo would trace what a compiled function calls of us as if it were the user's own code, and
cannot: groups and reducers hold objects of MPI and threads. ``torch.compiler.disable`` imports
Dynamo (seconds) and puts a wrapper around every call. The marks below are what it leaves on a
function, without the wrapper: attributes, which Dynamo reads where it would inline a call, and an
entry beside the code object, which its frame evaluation reads where it would compile a frame. Both
lie idle while nothing is being compiled.

Source: torch/_dynamo/eval_frame.py (DisableContext), torch/csrc/dynamo/eval_frame.c.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

_REASON = "mpidist: MPI's objects and threads cannot be traced"

Marked = TypeVar("Marked", bound="type | Callable[..., Any]")


def untraced(marked: Marked) -> Marked:
    """Have Dynamo call a function, or the methods that a class defines, and all that they call, instead of tracing them.

    Returns:
        The same object; for a decorator.
    """
    for function in _functions(marked):
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
        function._torchdynamo_disable_recursive = True  # type: ignore[attr-defined]
        _skip(function.__code__)
    return marked


def _functions(marked: Any) -> Iterator[types.FunctionType]:
    for member in vars(marked).values() if isinstance(marked, type) else (marked,):
        found = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if isinstance(found, types.FunctionType):
            yield found


def _skip(code: types.CodeType) -> None:
    evaluation: Any = torch._C._dynamo.eval_frame
    evaluation.set_code_exec_strategy(code, _strategy())


@functools.cache
def _strategy() -> Any:
    # By the names of the extension module, which is there without torch._dynamo.
    evaluation: Any = torch._C._dynamo.eval_frame
    skip = evaluation._FrameAction.SKIP
    return evaluation._FrameExecStrategy(skip, skip)
