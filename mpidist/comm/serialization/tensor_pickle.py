"""Pickle (protocol 5) that refers to tensors by number; the tensors travel in a ``tensor_table``.

Memory of other objects that export it out of band (PEP 574) follows the tensors' parts.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch

from mpidist.comm.serialization import tensor_table
from mpidist.comm.serialization.tensor_format import Buffer, Tabled


class Sink:
    """Objects that a pickle refers to by number.

    Attributes:
        objects: In the order of their numbers; ``tensor_table.describe`` takes them.
        buffers: Out-of-band memory of other objects.
    """

    __slots__ = ("buffers", "objects")

    def __init__(self) -> None:
        self.objects: list[Tabled] = []
        self.buffers: list[pickle.PickleBuffer] = []

    def number(self, obj: Tabled) -> int:
        """Assign the next number to an object; pickle memoizes objects, so each gets one number."""
        self.objects.append(obj)
        return len(self.objects) - 1

    def reduced(self, obj: Any) -> Any:
        """Return how an object is pickled; ``NotImplemented`` for pickle's default.

        Raises:
            TypeError: A tensor whose layout is not sent.
        """
        kind = type(obj)
        if kind is np.ndarray or kind is torch.Tensor or kind is torch.nn.Parameter:
            if tensor_table.is_describable(obj):
                return _nth, (self.number(obj),)
            if (
                kind is not np.ndarray
                and obj.__dict__
                and tensor_table.is_describable(plain := _without_attributes(obj))
            ):
                return _with_attributes, (_Numbered(self.number(plain)), obj.__dict__)
            if kind is not np.ndarray:
                tensor_table.require_layout(obj)
        return NotImplemented


class _CurrentObjects(threading.local):
    """Objects by number for the pickle that this thread is reading."""

    objects: Sequence[Tabled] = ()


_current = _CurrentObjects()


def _nth(number: int) -> Tabled:
    return _current.objects[number]


def _with_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> torch.Tensor:
    tensor.__dict__.update(attributes)
    return tensor


class _Numbered:
    """Placeholder of an object that has a number."""

    __slots__ = ("_number",)

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _nth, (self._number,)


def _without_attributes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    if type(tensor) is torch.nn.Parameter:
        return torch.nn.Parameter(plain, requires_grad=tensor.requires_grad)
    return plain.requires_grad_() if tensor.requires_grad else plain


class TablePickler(pickle.Pickler):
    """Pickler for importable objects.

    Args:
        sink: Receives what travels outside of the pickle.
    """

    def __init__(self, stream: io.BytesIO, sink: Sink) -> None:
        super().__init__(stream, 5, buffer_callback=sink.buffers.append)
        self._reduced = sink.reduced

    def reducer_override(self, obj: object) -> Any:
        """See ``pickle.Pickler.reducer_override``."""
        kind = type(obj)
        if kind is FunctionType or kind is type or kind is BuiltinFunctionType:
            return NotImplemented
        return self._reduced(obj)


def dumps(obj: object, sink: Sink) -> bytes:
    """Pickle an object; ``sink`` receives what travels outside of the pickle."""
    stream = io.BytesIO()
    TablePickler(stream, sink).dump(obj)
    return stream.getvalue()


def loads(pickled: Buffer, objects: Sequence[Tabled], buffers: Sequence[Any]) -> Any:
    """Unpickle an object.

    Args:
        objects: The objects by number.
        buffers: Out-of-band memory, in order.
    """
    before, _current.objects = _current.objects, objects
    try:
        return pickle.loads(pickled, buffers=buffers)
    finally:
        _current.objects = before
