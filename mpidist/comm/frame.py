"""The wire form of a Python object: a fixed header, the sizes, the pickle, then large memory out of band (PEP 574).

::

    magic "MPIF" | version u16 | reserved u16 | buffers n u64 | pickle length u64 | n buffer lengths u64 …    (header)
    pickle bytes, protocol 5
    n raw buffers, which travel straight from and into the memory of tensors and arrays

CPU tensors go out of band, dtype, shape and ``requires_grad`` kept; their values are not copied to encode. Unpickling runs what
the sender put in: frames are accepted from ranks of the same job only.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Sequence
from typing import Any

import torch

from mpidist.errors import FrameError
from mpidist.kernels.view import byte_view

_MAGIC = b"MPIF"
_VERSION = 1
_FIXED = struct.Struct("<4sHHQQ")
_LENGTH = struct.Struct("<Q")
HEADER_BYTES = _FIXED.size
_MAX_BUFFERS = 1 << 20  # more than any real object has; a header that says more is not ours


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        # Plain dense CPU tensors; whatever is special about the rest, torch's own pickling knows.
        if type(obj) is torch.Tensor and obj.layout is torch.strided and obj.is_cpu and not obj.is_quantized and obj.is_leaf:
            if obj.__dict__ or obj.is_conj() or obj.is_neg():
                return NotImplemented
            dense = obj.detach().contiguous()
            raw: Any = byte_view(dense).numpy() if dense.numel() else b""
            return _rebuild_tensor, (pickle.PickleBuffer(raw), obj.dtype, tuple(obj.shape), obj.requires_grad)
        return NotImplemented


def _rebuild_tensor(raw: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    if memoryview(raw).nbytes == 0:
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
    else:
        view = memoryview(raw)
        # In-band pickles hand out read-only bytes; a tensor must own memory it may write.
        tensor = torch.frombuffer(bytearray(raw) if view.readonly else raw, dtype=dtype).view(shape)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def encode(obj: Any) -> tuple[bytes, list[memoryview]]:
    """Turn an object into a header and the memory that follows it.

    Returns:
        The header with all lengths, and [pickle, buffer, …] in the order in which they are sent.

    Raises:
        Exception: What pickle raises for an object it cannot handle.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(obj)
    body = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
    header = _FIXED.pack(_MAGIC, _VERSION, 0, len(buffers), body[0].nbytes)
    return header + b"".join(_LENGTH.pack(part.nbytes) for part in body[1:]), body


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
    """Rebuild the object from [pickle, buffer, …]; tensors keep the buffers' memory as their own.

    Raises:
        FrameError: The bytes do not rebuild an object.
    """
    try:
        return pickle.loads(body[0], buffers=body[1:])
    except (pickle.UnpicklingError, EOFError) as error:
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
