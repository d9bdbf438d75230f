"""Marks that keep torch.compile out of this library's Python code.

Dynamo traces the functions that a compiled function calls as if they were the user's own code. For
groups and reducers this fails, because they hold MPI objects and threads.
``torch.compiler.disable`` imports Dynamo (seconds) and wraps every call. The marks below are what
it leaves on a function, without the wrapper: attributes, which Dynamo reads where it would inline a
call, and an entry kept with the code object, which its frame evaluation reads where it would
compile a frame. Both cost nothing while nothing is being compiled.

Source: torch/_dynamo/eval_frame.py (DisableContext), torch/csrc/dynamo/eval_frame.c.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

_REASON = "mpidist: MPI's objects and threads cannot be traced"

Marked = TypeVar("Marked", bound="type | Callable[..., object]")


def untraced(marked: Marked) -> Marked:
    """Mark a function, or the methods of a class: Dynamo calls them instead of tracing them.

    This includes all functions that they call.

    Returns:
        The same object, for use as a decorator.
    """
    for function in _functions(marked):
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
        function._torchdynamo_disable_recursive = True  # type: ignore[attr-defined]
        _skip(function.__code__)
    return marked


def _functions(marked: object) -> Iterator[types.FunctionType]:
    for member in vars(marked).values() if isinstance(marked, type) else (marked,):
        found = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if isinstance(found, types.FunctionType):
            yield found


def _skip(code: types.CodeType) -> None:
    evaluation: Any = torch._C._dynamo.eval_frame
    evaluation.set_code_exec_strategy(code, _strategy())


@functools.cache
def _strategy() -> Any:
    # The names of the extension module are available without importing torch._dynamo.
    evaluation: Any = torch._C._dynamo.eval_frame
    skip = evaluation._FrameAction.SKIP
    return evaluation._FrameExecStrategy(skip, skip)
