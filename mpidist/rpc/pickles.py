"""Pickles of what is no plain data, with tensors and references in tables beside them.

Functions and classes travel by name; those without an importable name need cloudpickle.
"""

from __future__ import annotations

import importlib
import io
import pickle
import threading
from collections.abc import Sequence
from typing import Any

import torch

from mpidist.comm.serialization import tensor_pickle
from mpidist.errors import MpidistError


class Reference:
    """The base of what travels as an entry of the reference table: a remote reference."""

    __slots__ = ()

    def require_shareable(self) -> None:
        """Raise what keeps this reference from being passed on."""

    def fork(self, to: int) -> tuple[int, int, int]:
        """Count a new holder on rank ``to``, and return reference, fork and the owner's rank."""
        raise NotImplementedError


class Carried:
    """The base of what messages carry by a rule of its own, and other pickles may refuse."""

    __slots__ = ()

    def reduced(self) -> Any:
        """Return the function that rebuilds the object, and its arguments, as ``__reduce__`` does."""
        raise NotImplementedError

    def contents(self) -> tuple[Any, ...]:
        """Return what a data-only message carries of the object (``data_values.register_carried``)."""
        raise NotImplementedError


def dumps(obj: Any) -> tuple[bytes, Sink]:
    """Pickle an object; return the pickle, and what travels beside it.

    Raises:
        Exception: What pickling raises; without an importable name, and without cloudpickle.
    """
    sink = Sink()
    try:
        return tensor_pickle.dumps(obj, sink), sink
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        sink = Sink()
        return _dumps_by_value(obj, sink, error), sink


def loads(
    pickled: Any, objects: Sequence[Any], references: Sequence[Any], buffers: Sequence[Any]
) -> Any:
    """Unpickle an object, with what came beside it."""
    before, _here.references = _here.references, references
    try:
        return tensor_pickle.loads(pickled, objects, buffers)
    finally:
        _here.references = before


class Sink(tensor_pickle.Sink):
    """Takes references as well; in a pickle they are numbered by themselves."""

    __slots__ = ("references",)

    def __init__(self) -> None:
        super().__init__()
        self.references: list[Reference] = []

    def reduced(self, obj: Any) -> Any:
        """See ``tensor_pickle.Sink``."""
        if isinstance(obj, Reference):
            self.references.append(obj)
            return _reference, (len(self.references) - 1,)
        if isinstance(obj, Carried):
            return obj.reduced()
        if isinstance(obj, torch.jit.ScriptModule):
            stream = io.BytesIO()
            try:
                torch.jit.save(obj, stream)
            except torch.jit.Error as error:
                raise MpidistError(
                    f"a script module of type {obj.original_name} cannot be sent: {error}"
                ) from error
            return _script_module, (stream.getvalue(),)
        return super().reduced(obj)


def _dumps_by_value(obj: Any, sink: Sink, error: Exception) -> bytes:
    try:
        cloudpickle: Any = importlib.import_module("cloudpickle")
    except ImportError:
        raise error from None

    class ValuePickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            reduced = sink.reduced(obj)
            return super().reducer_override(obj) if reduced is NotImplemented else reduced

    stream = io.BytesIO()
    ValuePickler(stream, 5, buffer_callback=sink.buffers.append).dump(obj)
    return stream.getvalue()


class _Here(threading.local):
    """References of the pickle that this thread is reading."""

    references: Sequence[Any] = ()


_here = _Here()


def _reference(number: int) -> Any:
    return _here.references[number]


def _script_module(data: bytes) -> Any:
    return torch.jit.load(io.BytesIO(data))
