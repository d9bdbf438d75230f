"""An object as a content (pickle, table, memory) and back.

The pickle (protocol 5) names tensors and remote references by number. Their table holds dtype, shape, strides and place of each
tensor, and the ids of each reference. What tensors cover of a storage travels once: views that overlap or adjoin in one message
still share memory on the other side; far apart ones do not drag along what lies between. Memory of arrays goes out of band as
PEP 574 has it. Values are copied to encode only if they are small, or lie scattered. A small tensor that shares its storage with
no other of the message stands in the pickle itself: that takes a third of the time.

Functions and classes travel by name. What has no importable name (lambdas, local classes) needs cloudpickle.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import pickle
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from mpidist.errors import FrameError
from mpidist.rpc.message import Content

Tensor = torch.Tensor

_SMALL_BYTES = 16 << 10  # memory up to this size is copied into the body
_WASTE_BYTES = 64 << 10  # what may travel unused between a tensor's elements, beside as much as the tensor itself
_IN_PICKLE_BYTES = 8 << 10  # a tensor up to this size may stand in the pickle
_COUNTS = struct.Struct("<II")  # tensors, references
_REFERENCE = struct.Struct("<QQI")  # reference, fork, owner's rank
_TENSOR = struct.Struct("<IBBHq")  # part, dtype, flags, dimensions, offset in elements; then the shape, then the strides
_REQUIRES_GRAD = 1
_WHOLE = 2  # flag: contiguous, and alone in its part; no strides follow
# Their places are the wire's numbers: new ones go to the end.
_DTYPE_NAMES = (
    "float32", "float64", "float16", "bfloat16", "complex64", "complex128", "complex32", "uint8", "int8", "int16", "int32",
    "int64", "bool", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu",
)  # fmt: skip
_DTYPES = [getattr(torch, name, None) for name in _DTYPE_NAMES]
_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES) if dtype is not None}


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
        # Storages of the tensors that stand in the pickle; None: all tensors go into the table.
        self.in_pickle: set[int] | None = None if needs_tensors else set()
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
            rows, content.parts, content.devices = _laid_out(self.tensors, device_map or {})
            # Last of all: nothing can fail any more, and no holder is counted that never comes to be.
            self.forks = [reference.fork(to) for reference in self.references]
            counts = _COUNTS.pack(len(self.tensors), len(self.references))
            content.table = b"".join((counts, *(_REFERENCE.pack(*numbers) for numbers in self.forks), *rows))
        for item in self.buffers:
            view = item.raw()
            content.parts.append(bytes(view) if view.nbytes <= _SMALL_BYTES else view)
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
    tensors, ids, used = _read_table(content)
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


def references_in(content: Content) -> list[tuple[int, int, int]]:
    """Return (reference, fork, owner's rank) of each reference in a content, without decoding it."""
    if not len(content.table):
        return []
    _, count = _COUNTS.unpack_from(content.table)
    return [_REFERENCE.unpack_from(content.table, _COUNTS.size + place * _REFERENCE.size) for place in range(count)]


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


def _small(raw: bytes, dtype: int, shape: tuple[int, ...], requires_grad: bool) -> Tensor:
    # Memory of its own, which may be written.
    flat = torch.frombuffer(bytearray(raw), dtype=_DTYPES[dtype]) if raw else torch.empty(0, dtype=_DTYPES[dtype], device="cpu")
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
    if layout == "coo":
        made = torch.sparse_coo_tensor(*parts, shape, is_coalesced=is_coalesced, check_invariants=False)
    else:
        made = torch.sparse_compressed_tensor(*parts, shape, layout=getattr(torch, layout), check_invariants=False)
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

    class ValuePickler(base):  # type: ignore[misc]
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
    if held is not None:
        if tensor.layout is torch.strided and tensor.is_cpu:
            storage = tensor.untyped_storage().data_ptr()
            if storage in held:
                raise _Shares
            nbytes = tensor.nbytes
            if nbytes <= _IN_PICKLE_BYTES and tensor.is_contiguous() and not sink.tensors and _is_simple(tensor):
                if nbytes:
                    held.add(storage)
                raw = ctypes.string_at(tensor.data_ptr(), nbytes) if nbytes else b""
                return _small, (raw, _DTYPE_NUMBERS[tensor.dtype], tuple(tensor.shape), tensor.requires_grad)
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
    if tensor.dtype not in _DTYPE_NUMBERS or not (tensor.is_cpu or tensor.is_cuda) or tensor.is_nested:
        return NotImplemented  # torch's own pickling knows
    sink.tensors.append(tensor)
    number = len(sink.tensors) - 1
    # A tensor whose attributes are set has a dict of its own; asking for it makes none.
    return (_with_attributes, (_Numbered(number), tensor.__dict__)) if tensor.__dict__ else (_tensor, (number,))


def _is_simple(tensor: Tensor) -> bool:
    return tensor.dtype in _DTYPE_NUMBERS and not (tensor.is_conj() or tensor.is_neg() or tensor.is_nested or tensor.__dict__)


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


def _laid_out(tensors: Sequence[Tensor], device_map: Mapping[int, int]) -> tuple[list[bytes], list[Any], list[int | None]]:
    """Say which memory travels: the rows of the table, and the parts with the receiver's devices."""
    plain = [_resolved(tensor) for tensor in tensors]
    parts: list[Any] = []
    devices: list[int | None] = []
    rows: list[bytes] = [b""] * len(plain)
    for members in _clusters(plain):
        first = plain[members[0]]
        low, high = _span(first)
        if len(members) == 1:
            if high - low > 2 * first.nbytes + _WASTE_BYTES:
                first = first.contiguous()  # scattered: what lies between need not travel
                low, high = _span(first)
            if first.is_contiguous():
                rows[members[0]] = _row(first, len(parts), _WHOLE | tensors[members[0]].requires_grad, 0, first.shape)
                parts.append(_memory(first, low, high))
                devices.append(_receivers_device(first, device_map))
                continue
        for place in members[1:]:
            span = _span(plain[place])
            low, high = min(low, span[0]), max(high, span[1])
        for place in members:
            tensor = plain[place]
            offset = (tensor.data_ptr() - low) // tensor.element_size() if tensor.numel() else 0
            sizes = (*tensor.shape, *tensor.stride())
            rows[place] = _row(tensor, len(parts), int(tensors[place].requires_grad), offset, sizes)
        parts.append(_memory(first, low, high))
        devices.append(_receivers_device(first, device_map))
    return rows, parts, devices


def _row(tensor: Tensor, part: int, flags: int, offset: int, sizes: Sequence[int]) -> bytes:
    row = _TENSOR.pack(part, _DTYPE_NUMBERS[tensor.dtype], flags, tensor.dim(), offset)
    return row + struct.pack(f"<{len(sizes)}q", *sizes)


def _resolved(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses between which the tensor's elements lie."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else -1
    return start, start + (reach + 1) * tensor.element_size()


def _clusters(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Group tensors of one storage whose spans overlap or adjoin, in the order of their first members."""
    if len(tensors) == 1:
        return [[0]]
    order = sorted(range(len(tensors)), key=lambda place: (tensors[place].device.index or -1, *_span(tensors[place])))
    clusters: list[list[int]] = []
    reach, owner = -1, None
    for place in order:
        tensor = tensors[place]
        low, high = _span(tensor)
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        if clusters and storage == owner and low <= reach and tensor.numel():
            clusters[-1].append(place)
            reach = max(reach, high)
        else:
            clusters.append([place])
            reach, owner = high, storage
    return sorted(map(sorted, clusters))


def _memory(tensor: Tensor, low: int, high: int) -> Any:
    nbytes = high - low
    if nbytes <= _SMALL_BYTES and tensor.is_cpu:
        return ctypes.string_at(low, nbytes) if nbytes else b""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, low - storage.data_ptr(), (nbytes,), (1,))


def _receivers_device(tensor: Tensor, device_map: Mapping[int, int]) -> int | None:
    if tensor.is_cpu:
        return None
    index = tensor.device.index
    if index not in device_map:
        raise ValueError(
            f"a tensor on {tensor.device} cannot be sent: the device map for this worker names {sorted(device_map) or 'no device'}; "
            "set it with RpcBackendOptions.set_device_map, or send tensor.cpu()"
        )
    return device_map[index]


def _read_table(content: Content) -> tuple[list[Tensor], list[tuple[int, int, int]], int]:
    """Return the tensors, the references' ids, and how many parts are tensors' memory."""
    table = content.table
    try:
        count, n_references = _COUNTS.unpack_from(table)
        place = _COUNTS.size
        references = [_REFERENCE.unpack_from(table, place + i * _REFERENCE.size) for i in range(n_references)]
        place += n_references * _REFERENCE.size
        tensors = []
        storages: dict[int, torch.UntypedStorage] = {}
        shared = -1
        for _ in range(count):
            number, dtype, flags, dims, offset = _TENSOR.unpack_from(table, place)
            place += _TENSOR.size
            numbers = dims if flags & _WHOLE else 2 * dims
            sizes = struct.unpack_from(f"<{numbers}q", table, place)
            place += 8 * numbers
            part = content.parts[number]
            if flags & _WHOLE:
                tensor = _whole(part, _DTYPES[dtype], sizes)
            else:
                tensor = _rebuilt(part, number, storages, _DTYPES[dtype], sizes[:dims], sizes[dims:], offset)
            tensors.append(tensor.requires_grad_() if flags & _REQUIRES_GRAD else tensor)
            shared = max(shared, number)
    except (struct.error, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise FrameError(f"the table of {len(table)} bytes does not describe what came with it: {error}") from error
    return tensors, references, shared + 1


def _whole(part: Any, dtype: Any, shape: tuple[int, ...]) -> Tensor:
    if isinstance(part, Tensor):
        return part.view(dtype).view(shape)
    if part.nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    flat = torch.frombuffer(part, dtype=dtype)
    return flat if len(shape) == 1 and shape[0] == flat.shape[0] else flat.view(shape)


def _rebuilt(part: Any, number: int, storages: Any, dtype: Any, shape: Any, strides: Any, offset: int) -> Tensor:
    storage = storages.get(number)
    if storage is None:
        if isinstance(part, Tensor):
            storage = part.untyped_storage()
        elif part.nbytes == 0:
            return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
        else:
            storage = torch.frombuffer(part, dtype=torch.uint8).untyped_storage()
        storages[number] = storage
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, strides)
