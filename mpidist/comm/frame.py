"""The wire form of a Python object: a fixed header, the sizes, the pickle, then large memory out of band (PEP 574).

::

    magic "MPIF" | version u16 | reserved u16 | buffers n u64 | pickle length u64 | n buffer lengths u64 …    (header)
    table bytes u32 | table of tensors (``tensor_format``) | pickle bytes, protocol 5
    n raw buffers, which travel straight from and into the memory of tensors and arrays

CPU tensors are described by the table; values of large ones are not copied to encode, and views keep sharing memory. Unpickling
runs what the sender put in: frames are accepted from ranks of the same job only.
"""

from __future__ import annotations

import ctypes
import pickle
import struct
from collections.abc import Sequence
from typing import Any

import torch

from mpidist.comm import tensor_pickle, tensor_rebuild, tensor_table
from mpidist.errors import FrameError

_MAGIC = b"MPIF"
_VERSION = 2
_FIXED = struct.Struct("<4sHHQQ")
_LENGTH = struct.Struct("<Q")
_TABLE = struct.Struct("<I")
HEADER_BYTES = _FIXED.size
_MAX_BUFFERS = 1 << 20  # more than any real object has; a header that says more is not ours


class _HostSink(tensor_pickle.Sink):
    """Leaves CUDA tensors to torch's own pickling: whoever receives an object has no say in its device."""

    __slots__ = ()

    def reduced(self, obj: Any) -> Any:
        """See ``tensor_pickle.Sink``."""
        if isinstance(obj, torch.Tensor) and not obj.is_cpu:
            return NotImplemented
        return super().reduced(obj)


def encode(obj: Any) -> tuple[bytes, list[memoryview]]:
    """Turn an object into a header and the memory that follows it.

    Returns:
        The header with all lengths, and [table and pickle, buffer, …] in the order in which they are sent.

    Raises:
        Exception: What pickle raises for an object it cannot handle.
    """
    sink = _HostSink()
    pickled = tensor_pickle.dumps(obj, sink)
    table, parts, _ = tensor_table.described(sink.objects) if sink.objects else (b"", [], [])
    body = [memoryview(_TABLE.pack(len(table)) + table + pickled)]
    body += [_memory(part) if isinstance(part, torch.Tensor) else memoryview(part).cast("B") for part in parts]
    body += [buffer.raw() for buffer in sink.buffers]
    header = _FIXED.pack(_MAGIC, _VERSION, 0, len(body) - 1, body[0].nbytes)
    return header + b"".join(_LENGTH.pack(part.nbytes) for part in body[1:]), body


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return a flat tensor's memory, which keeps the tensor; ``numpy()`` would forbid to resize it from then on."""
    memory: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor
    return memoryview(memory).cast("B")


def buffer_count(fixed: bytes | bytearray | memoryview) -> int:
    """Read the number of buffers from the first ``HEADER_BYTES`` bytes; the header is 8 bytes longer for each.

    Raises:
        FrameError: Not a header of ours.
    """
    if len(fixed) < HEADER_BYTES:
        raise FrameError(f"truncated frame: {len(fixed)} of {HEADER_BYTES} header bytes")
    magic, version, _, buffers, _ = _FIXED.unpack_from(fixed)
    if magic != _MAGIC:
        raise FrameError(f"not a frame: starts with {bytes(magic)!r}")
    if version != _VERSION:
        raise FrameError(f"frame version {version}; this side speaks {_VERSION}: all ranks need the same mpidist")
    if buffers > _MAX_BUFFERS:
        raise FrameError(f"frame announces {buffers} buffers; at most {_MAX_BUFFERS} are accepted")
    return int(buffers)


def body_lengths(header: bytes | bytearray | memoryview) -> list[int]:
    """Read the length in bytes of the pickle and of each buffer.

    Raises:
        FrameError: Truncated, or not a header of ours.
    """
    buffers = buffer_count(header)
    if len(header) < HEADER_BYTES + _LENGTH.size * buffers:
        raise FrameError(f"truncated frame: {buffers} buffers announced, lengths cut off after {len(header)} bytes")
    pickle_length = _FIXED.unpack_from(header)[4]
    return [pickle_length, *(_LENGTH.unpack_from(header, HEADER_BYTES + _LENGTH.size * i)[0] for i in range(buffers))]


def decode(body: Sequence[Any]) -> Any:
    """Rebuild the object from [table and pickle, buffer, …]; tensors keep the buffers' memory as their own.

    Raises:
        FrameError: The bytes do not rebuild an object.
    """
    try:
        first = memoryview(body[0])
        (table_bytes,) = _TABLE.unpack_from(first)
        # In-band parts may be read-only bytes; a tensor must own memory it may write.
        parts = [part if not (view := memoryview(part)).readonly else memoryview(bytearray(view)) for part in body[1:]]
        parts = [memoryview(part) for part in parts]
        objects: list[Any] = []
        used = 0
        if table_bytes:
            objects, used, _ = tensor_rebuild.read(first, _TABLE.size, parts)
        return tensor_pickle.loads(first[_TABLE.size + table_bytes :], objects, parts[used:])
    except (pickle.UnpicklingError, EOFError, struct.error) as error:
        raise FrameError(f"the pickle of a frame is damaged: {error}") from error


def to_bytes(obj: Any) -> bytearray:
    """Turn an object into one run of bytes."""
    header, body = encode(obj)
    return bytearray().join([header, *body])


def from_bytes(data: Any) -> Any:
    """Rebuild an object from one run of bytes.

    Raises:
        FrameError: Truncated, or with bytes left over.
    """
    view = memoryview(data)
    lengths = body_lengths(view)
    place = HEADER_BYTES + _LENGTH.size * (len(lengths) - 1)
    if view.nbytes != place + sum(lengths):
        raise FrameError(f"frame of {view.nbytes} bytes; its header announces {place + sum(lengths)}")
    body = []
    for length in lengths:
        body.append(view[place : place + length])
        place += length
    return decode(body)
