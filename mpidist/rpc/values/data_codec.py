"""Encoding for workers with a list: as ``codec``, without pickles.

Beyond the references of ``codec``, a message has the extension types of ``data_values``. An object
that is not data raises an error at the sender, with the name of the argument.
"""

from __future__ import annotations

import inspect
from typing import Any

from mpidist.comm.serialization import data_writer
from mpidist.errors import NotPlainData
from mpidist.rpc.names import callee
from mpidist.rpc.values import codec, remote_error
from mpidist.rpc.values.codec import EMPTY, Args, Content, Kwargs
from mpidist.rpc.values.data_values import ExtensionWriter

_POSITIONAL = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)


class DataEncoder:
    """Encoder of the messages to one worker with a list (see ``codec.Encoder``).

    Args:
        worker: The name of that worker, for errors.
    """

    __slots__ = ("_reads",)

    def __init__(self, worker: str) -> None:
        self._reads = f"and {worker} reads data only (it has a list: init_rpc(..., allowed=[...]))"

    def encode_function(self, function: object, name: bytes, args: Args, kwargs: Kwargs) -> Content:
        """Encode a call's arguments.

        Args:
            function: For errors.
            name: The function's wire name; a function without one cannot be sent.
            args: Positional arguments.
            kwargs: Keyword arguments.

        Raises:
            NotPlainData: An argument is not data (the error names it), or the function has no
                importable name.
        """
        if len(name) <= 2:
            raise NotPlainData(f"{function!r} has no importable name, {self._reads}")
        if type(args) is not tuple:
            args = tuple(args or ())
        if not args and not kwargs:
            return EMPTY
        try:
            content = codec.encode_arguments(args, kwargs, ExtensionWriter, is_exact=False)
            if not codec.is_describable(content):
                _refuse([list(kwargs), *args, *kwargs.values()] if kwargs else list(args))
        except NotPlainData as error:
            path = _argument_name(function, error.place, len(args), list(kwargs or ()))
            raise NotPlainData(f"{error.reason}, {self._reads}", path) from None
        content.is_dense = True
        return content

    def encode(self, obj: object) -> Content:
        """Encode a result.

        Raises:
            NotPlainData: The result is not data.
        """
        if (content := codec.encode_lone(obj)) is not None:
            if content.table is None:
                content.is_dense = True
            return content
        try:
            content = codec.encode_object(0, obj, ExtensionWriter, is_exact=False)
            if not codec.is_describable(content):
                _refuse(obj)
        except NotPlainData as error:
            raise NotPlainData(
                f"{error.reason}, {self._reads}", f"the result or value{error.place}"
            ) from None
        content.is_dense = True
        return content

    def describe_error(self, error: BaseException) -> object:
        """Return an exception as data, for ``remote_error.rebuild``."""
        return remote_error.describe(error, as_data=True)


def _refuse(obj: object) -> None:
    """Raise the error for an object with a tensor that the table cannot describe."""
    data_writer.dumps(obj, [], ExtensionWriter().extend)


def _argument_name(function: Any, path: str, positional: int, keywords: list[str]) -> str:
    """Return the argument at a path in [keywords, *positional, *values], for errors."""
    head, _, rest = path.partition("]")
    number = int(head[1:]) - bool(keywords) if head[1:].isdecimal() else 0
    if number >= positional:
        return f"argument {keywords[number - positional]!r}{rest}"
    if type(function) is callee.Method:
        return f"argument {number - 1}{rest}"  # without the reference
    try:
        parameters = list(inspect.signature(function).parameters.values())[: number + 1]
    except (TypeError, ValueError):
        parameters = []  # a builtin function
    if number < len(parameters) and parameters[number].kind in _POSITIONAL:
        return f"argument {parameters[number].name!r}{rest}"
    return f"argument {number}{rest}"
