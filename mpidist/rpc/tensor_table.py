"""The tensors and references of a message as a table, and the memory that travels for them.

What tensors cover of a storage travels once: views that overlap or adjoin still share memory on the other side; far apart ones do
not drag along what lies between.

::

    tensors n u32 | references m u32 | m × (reference u64, fork u64, owner u32) | n rows
    row: part u32 | dtype u8 | flags u8 | dimensions d u16 | offset in elements i64 | shape d × i64 | strides d × i64 (or none)
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mpidist.errors import FrameError
from mpidist.rpc.message import Content

Tensor = torch.Tensor
Numbers = tuple[int, int, int]  # reference, fork, owner's rank

SMALL_BYTES = 16 << 10  # memory up to this size is copied into the body
_WASTE_BYTES = 64 << 10  # what may travel unused between a tensor's elements, beside as much as the tensor itself
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
DTYPES = [getattr(torch, name, None) for name in _DTYPE_NAMES]
DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES) if dtype is not None}


def laid_out(tensors: Sequence[Tensor], device_map: Mapping[int, int]) -> tuple[list[bytes], list[Any], list[int | None]]:
    """Say which memory travels for tensors.

    Args:
        tensors: Of any strides, on the CPU or a CUDA device.
        device_map: From this rank's device indices to the receiver's.

    Returns:
        The rows of the table, the parts (``bytes`` of small memory, flat ``uint8`` tensors of large), and the receiver's device
        index of each part.

    Raises:
        ValueError: A tensor on a device that ``device_map`` does not name.
    """
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
    row = _TENSOR.pack(part, DTYPE_NUMBERS[tensor.dtype], flags, tensor.dim(), offset)
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
    if nbytes <= SMALL_BYTES and tensor.is_cpu:
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
            f"a tensor on {tensor.device} cannot be sent: the device map for this worker names "
            f"{sorted(device_map) or 'no device'}; set it with RpcBackendOptions.set_device_map, or send tensor.cpu()"
        )
    return device_map[index]


def written(references: Sequence[Numbers], rows: Sequence[bytes]) -> bytes:
    """Write the table of references and of tensors' rows."""
    return b"".join((_COUNTS.pack(len(rows), len(references)), *(_REFERENCE.pack(*numbers) for numbers in references), *rows))


def references_in(content: Content) -> list[Numbers]:
    """Return the references of a content, without decoding it."""
    if not len(content.table):
        return []
    _, count = _COUNTS.unpack_from(content.table)
    return [_REFERENCE.unpack_from(content.table, _COUNTS.size + place * _REFERENCE.size) for place in range(count)]


def read(content: Content) -> tuple[list[Tensor], list[Numbers], int]:
    """Return the tensors, the references, and how many parts are tensors' memory.

    Raises:
        FrameError: The table does not fit what has come.
    """
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
                tensor = _whole(part, DTYPES[dtype], sizes)
            else:
                tensor = _rebuilt(part, number, storages, DTYPES[dtype], sizes[:dims], sizes[dims:], offset)
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
