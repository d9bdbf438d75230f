"""An object as a content (pickle, table, memory) and back.

The pickle (protocol 5) names tensors and remote references by number. Their table holds dtype, shape, strides and place of each
tensor, and the ids of each reference (``tensor_table``). Memory of arrays goes out of band as PEP 574 has it. Values are copied
to encode only if they are small, or lie scattered. A small tensor that shares its storage with no other of the message stands in
the pickle itself: that takes a third of the time.

Functions and classes travel by name. What has no importable name (lambdas, local classes) needs cloudpickle.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from mpidist.rpc import tensor_table
from mpidist.rpc.message import Content
from mpidist.rpc.tensor_table import DTYPE_NUMBERS, DTYPES, SMALL_BYTES

Tensor = torch.Tensor

_IN_PICKLE_BYTES = 8 << 10  # a tensor up to this size may stand in the pickle


class Reference:
    """The base of what travels as an entry of the reference table: a remote reference."""

    __slots__ = ()

    def require_shareable(self) -> None:
        """Raise what keeps this reference from being passed on."""

    def fork(self, to: int) -> tuple[int, int, int]:
        """Count a new holder on rank ``to``, and return reference, fork and the owner's rank."""
        raise NotImplementedError


class _Shares(Exception):
    """A tensor shares its storage with one that stands in the pickle already."""


class _Place(threading.local):
    """What the numbers in the pickle that this thread is reading stand for."""

    def __init__(self) -> None:
        self.tensors: Sequence[Tensor] = ()
        self.references: Sequence[Callable[[], Any]] = ()


_place = _Place()


class Encoding:
    """An object on its way out.

    Attributes:
        tensors: The plain tensors that the pickle names, in their order: all if ``needs_tensors``.
        references: All remote references in it.
        forks: (reference, fork, owner's rank) of each, once ``content`` was called.
    """

    __slots__ = ("buffers", "forks", "in_pickle", "pickled", "references", "tensors")

    def __init__(self, obj: Any, needs_tensors: bool = False) -> None:
        # The tensors that stand in the pickle; None: all go into the table.
        self.in_pickle: list[Tensor] | None = None if needs_tensors else []
        self._clear()
        # A pickler costs as much as what it does to a small message: a thread keeps its own, unless it is at work already.
        pickler = _place.__dict__.pop("pickler", None) or _Pickler(io.BytesIO())
        try:
            self.pickled = pickler.pickled(obj, self)
        except _Shares:
            self.in_pickle = None
            self._clear()
            self.pickled = pickler.pickled(obj, self)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self.pickled = self._pickled_by_value(obj, error)
        finally:
            _place.pickler = pickler

    def _clear(self) -> None:
        self.tensors: list[Tensor] = []
        self.references: list[Reference] = []
        self.forks: list[tuple[int, int, int]] = []
        self.buffers: list[pickle.PickleBuffer] = []

    def content(self, to: int, device_map: Mapping[int, int] | None = None) -> Content:
        """Lay the memory out, and count the references' new holders.

        Args:
            to: The receiver's rank.
            device_map: From this rank's device indices to the receiver's.

        Raises:
            ValueError: A tensor on a device that ``device_map`` does not name.
        """
        content = Content(self.pickled)
        if self.tensors or self.references:
            for reference in self.references:
                reference.require_shareable()
            rows, content.parts, content.devices = tensor_table.laid_out(self.tensors, device_map or {})
            # Last of all: nothing can fail any more, and no holder is counted that never comes to be.
            self.forks = [reference.fork(to) for reference in self.references]
            content.table = tensor_table.written(self.forks, rows)
        for item in self.buffers:
            view = item.raw()
            content.parts.append(bytes(view) if view.nbytes <= SMALL_BYTES else view)
            content.devices.append(None)
        return content

    def _pickled_by_value(self, obj: Any, error: Exception) -> bytes:
        try:
            cloudpickle: Any = importlib.import_module("cloudpickle")
        except ImportError:
            raise error from None
        self.in_pickle = None
        self._clear()
        stream = io.BytesIO()
        _value_pickler(cloudpickle.Pickler)(stream, self).dump(obj)
        return stream.getvalue()


def decode(
    content: Content,
    adopt: Callable[[int, int, int], Any],
    forget: Callable[[int, int, int], None],
    attach: Callable[[list[Tensor]], list[Tensor]] | None = None,
    unpickler: Callable[..., Any] = pickle.Unpickler,
) -> Any:
    """Rebuild the object; tensors and arrays own the memory that they came in.

    Args:
        content: What has arrived.
        adopt: Makes a reference of its ids and its owner's rank.
        forget: Called with those of references that came but were not made.
        attach: Gets all tensors and returns those that take their places: distributed autograd's seam.
        unpickler: The class that reads; another than pickle's may refuse names.

    Raises:
        FrameError: Tables that do not fit what has come.
        Exception: What unpickling raises.
    """
    if not len(content.table):
        if unpickler is pickle.Unpickler:
            return pickle.loads(content.pickled, buffers=content.parts)
        return unpickler(io.BytesIO(content.pickled), buffers=content.parts).load()
    tensors, ids, used = tensor_table.read(content)
    references = [_Adopted(adopt, numbers) for numbers in ids]
    before = _place.tensors, _place.references
    try:
        _place.tensors = attach(tensors) if attach is not None and tensors else tensors
        _place.references = references
        if unpickler is pickle.Unpickler:
            return pickle.loads(content.pickled, buffers=content.parts[used:])
        return unpickler(io.BytesIO(content.pickled), buffers=content.parts[used:]).load()
    finally:
        _place.tensors, _place.references = before
        for reference in references:
            if not reference.is_made:
                forget(*reference.numbers)


class _Adopted:
    """Makes a reference once, however often the pickle names it."""

    __slots__ = ("_adopt", "_made", "is_made", "numbers")

    def __init__(self, adopt: Callable[[int, int, int], Any], numbers: tuple[int, int, int]) -> None:
        self._adopt, self.numbers = adopt, numbers
        self._made: Any = None
        self.is_made = False

    def __call__(self) -> Any:
        if not self.is_made:
            self._made = self._adopt(*self.numbers)
            self.is_made = True
        return self._made


def _small(raw: bytes, number: int, shape: tuple[int, ...], requires_grad: bool) -> Tensor:
    # Memory of its own, which may be written.
    dtype: Any = DTYPES[number]
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype, device="cpu")
    tensor = flat if len(shape) == 1 else flat.view(shape)
    return tensor.requires_grad_() if requires_grad else tensor


def _tensor(number: int) -> Tensor:
    return _place.tensors[number]


def _reference(number: int) -> Any:
    return _place.references[number]()


def _with_attributes(tensor: Tensor, attributes: dict[str, Any]) -> Tensor:
    tensor.__dict__.update(attributes)
    return tensor


def _sparse(layout: str, parts: tuple[Tensor, ...], shape: tuple[int, ...], is_coalesced: bool, requires_grad: bool) -> Tensor:
    make: Any
    if layout == "coo":
        make = partial(torch.sparse_coo_tensor, is_coalesced=is_coalesced)
    else:
        make = partial(torch.sparse_compressed_tensor, layout=getattr(torch, layout))
    made: Tensor = make(*parts, shape, check_invariants=False)
    return made.requires_grad_(requires_grad)


def _quantized(values: Tensor, scale: Any, zero_point: Any, axis: int | None) -> Tensor:
    if axis is None:
        return torch._make_per_tensor_quantized_tensor(values, scale, zero_point)
    return torch._make_per_channel_quantized_tensor(values, scale, zero_point, axis)


def _script_module(data: bytes) -> Any:
    return torch.jit.load(io.BytesIO(data))


REBUILDERS = (_small, _tensor, _reference, _with_attributes, _sparse, _quantized, _script_module)


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, 5, buffer_callback=self._take_buffer)
        self._stream = stream
        self._sink: Any = None

    def pickled(self, obj: Any, sink: Encoding) -> bytes:
        """Pickle an object; what travels beside the pickle goes to ``sink``."""
        self._sink = sink
        try:
            self.dump(obj)
            return self._stream.getvalue()
        finally:
            self._sink = None
            self.clear_memo()
            self._stream.seek(0)
            self._stream.truncate()

    def _take_buffer(self, item: pickle.PickleBuffer) -> None:
        self._sink.buffers.append(item)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is FunctionType or kind is type or kind is BuiltinFunctionType:
            return NotImplemented
        return _reduced(obj, self._sink)


def _value_pickler(base: Any) -> Any:
    """Derive from cloudpickle's pickler, which pickles functions and classes that have no importable name by their code."""

    class ValuePickler(base):
        def __init__(self, stream: io.BytesIO, sink: Encoding) -> None:
            super().__init__(stream, 5, buffer_callback=sink.buffers.append)
            self._sink = sink

        def reducer_override(self, obj: Any) -> Any:
            reduced = _reduced(obj, self._sink)
            return super().reducer_override(obj) if reduced is NotImplemented else reduced

    return ValuePickler


def _reduced(obj: Any, sink: Encoding) -> Any:
    if type(obj) is Tensor:
        return _reduced_tensor(obj, sink)
    if isinstance(obj, Reference):
        sink.references.append(obj)
        return _reference, (len(sink.references) - 1,)
    if isinstance(obj, torch.jit.ScriptModule):
        stream = io.BytesIO()
        torch.jit.save(obj, stream)
        return _script_module, (stream.getvalue(),)
    return NotImplemented


def _reduced_tensor(tensor: Tensor, sink: Encoding) -> Any:
    held = sink.in_pickle
    if held is not None and tensor.layout is torch.strided and tensor.is_cpu:
        if held and _shares_storage(tensor, held):
            raise _Shares
        nbytes = tensor.nbytes
        if nbytes <= _IN_PICKLE_BYTES and tensor.is_contiguous() and not sink.tensors and _is_simple(tensor):
            held.append(tensor)
            raw = ctypes.string_at(tensor.data_ptr(), nbytes) if nbytes else b""
            return _small, (raw, DTYPE_NUMBERS[tensor.dtype], tuple(tensor.shape), tensor.requires_grad)
    if tensor.layout is not torch.strided:
        return _reduced_sparse(tensor)
    if tensor.is_quantized:
        values = tensor.int_repr()
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return _quantized, (values, tensor.q_scale(), tensor.q_zero_point(), None)
        return _quantized, (
            values,
            tensor.q_per_channel_scales(),
            tensor.q_per_channel_zero_points(),
            tensor.q_per_channel_axis(),
        )
    if tensor.dtype not in DTYPE_NUMBERS or not (tensor.is_cpu or tensor.is_cuda) or tensor.is_nested:
        return NotImplemented  # torch's own pickling knows
    sink.tensors.append(tensor)
    number = len(sink.tensors) - 1
    # A tensor whose attributes are set has a dict of its own; asking for it makes none.
    return (_with_attributes, (_Numbered(number), tensor.__dict__)) if tensor.__dict__ else (_tensor, (number,))


def _shares_storage(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    mine = tensor.untyped_storage().data_ptr()
    return mine != 0 and any(other.untyped_storage().data_ptr() == mine for other in others)


def _is_simple(tensor: Tensor) -> bool:
    return tensor.dtype in DTYPE_NUMBERS and not (tensor.is_conj() or tensor.is_neg() or tensor.is_nested or tensor.__dict__)


class _Numbered:
    """Stands for a tensor that has its number already."""

    __slots__ = ("_number",)

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return _tensor, (self._number,)


def _reduced_sparse(tensor: Tensor) -> Any:
    plain = tensor.detach()
    shape, requires_grad = tuple(tensor.shape), tensor.requires_grad
    if tensor.layout is torch.sparse_coo:
        return _sparse, ("coo", (plain._indices(), plain._values()), shape, tensor.is_coalesced(), requires_grad)
    layout = str(tensor.layout).removeprefix("torch.")
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return _sparse, (layout, (plain.crow_indices(), plain.col_indices(), plain.values()), shape, False, requires_grad)
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return _sparse, (layout, (plain.ccol_indices(), plain.row_indices(), plain.values()), shape, False, requires_grad)
    return NotImplemented
