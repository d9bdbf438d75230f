"""Pickling of objects other than plain data; tensors and references are in separate tables.

Functions and classes are pickled by name; those without an importable name need cloudpickle.
"""

from __future__ import annotations

import importlib
import io
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpidist.comm.serialization import tensor_pickle
from mpidist.comm.serialization.tensor_format import Buffer, Tabled
from mpidist.errors import MpidistError


class Reference:
    """Base of remote references, which messages carry in the reference table."""

    __slots__ = ()

    def require_shareable(self) -> None:
        """Raise if this reference cannot be passed on."""

    def delete(self) -> None:
        """Delete this holder."""
        raise NotImplementedError

    def fork(self, to: int) -> tuple[int, int, int]:
        """Count a new holder on rank ``to``; return reference, fork and the owner's rank."""
        raise NotImplementedError


class Registered:
    """Base of classes that are registered under a number, whose objects are sent by RPC alone.

    A pickle holds their own reduction; a data-only message, the number and their contents.
    """

    __slots__ = ()

    def reduced(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        """Return a function that rebuilds the object, and its arguments (as ``__reduce__``)."""
        raise NotImplementedError

    def contents(self) -> tuple[object, ...]:
        """Return the contents for data-only messages (see ``data_values.register_class``)."""
        raise NotImplementedError


def dumps(obj: object) -> tuple[bytes, Sink]:
    """Pickle an object; return the pickle, and the sink with its tensors and references.

    Raises:
        Exception: Pickling has failed, or cloudpickle is needed and not installed.
    """
    sink = Sink()
    try:
        return tensor_pickle.dumps(obj, sink), sink
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        sink = Sink()
        return _dumps_by_value(obj, sink, error), sink


def loads(
    pickled: Buffer,
    objects: Sequence[Tabled],
    references: Sequence[Reference],
    buffers: Sequence[Any],
) -> Any:
    """Unpickle an object, with its tables and out-of-band buffers."""
    before, _here.references = _here.references, references
    try:
        return tensor_pickle.loads(pickled, objects, buffers)
    finally:
        _here.references = before


class Sink(tensor_pickle.Sink):
    """Collector of the tensors and references of one pickle, each numbered separately."""

    __slots__ = ("references",)

    def __init__(self) -> None:
        super().__init__()
        self.references: list[Reference] = []

    def reduced(self, obj: object) -> object:
        """See ``tensor_pickle.Sink``."""
        if isinstance(obj, Reference):
            self.references.append(obj)
            return _reference, (len(self.references) - 1,)
        if isinstance(obj, Registered):
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


def _dumps_by_value(obj: object, sink: Sink, error: Exception) -> bytes:
    try:
        # The submodule first, as a thread does that reads such a pickle at the same time: in the
        # other order they would wait for each other, and Python ends one of the imports.
        importlib.import_module("cloudpickle.cloudpickle")
        cloudpickle: Any = importlib.import_module("cloudpickle")
    except ImportError:
        raise error from None

    class ValuePickler(cloudpickle.Pickler):
        def reducer_override(self, obj: object) -> object:
            reduced = sink.reduced(obj)
            return super().reducer_override(obj) if reduced is NotImplemented else reduced

    stream = io.BytesIO()
    ValuePickler(stream, 5, buffer_callback=sink.buffers.append).dump(obj)
    return stream.getvalue()


class _Here(threading.local):
    """References of the pickle that the thread reads."""

    references: Sequence[Reference] = ()


_here = _Here()


def _reference(number: int) -> Reference:
    return _here.references[number]


def _script_module(data: bytes) -> torch.jit.ScriptModule:
    return torch.jit.load(io.BytesIO(data))
