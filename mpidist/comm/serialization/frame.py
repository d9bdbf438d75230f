"""Wire format of a Python object: header, sizes, content, then large memory out of band (PEP 574).

::

    magic "MPIF" | version u16 | format u16 | buffers n u64 | content length u64 | n × length u64
    table bytes u32 | table of tensors (``tensor_format``) | content
    n raw buffers, sent from and received into the memory of tensors and arrays

The table describes CPU tensors; values of large ones are not copied, and views keep sharing memory.
The content has one of three formats: a pickle (protocol 5), data (``data_format``), or a refusal,
which is the text of why the sender could not send its object. Unpickling executes code that the
sender chose, so pickles are accepted only from ranks of the same job, and never by a receiver with
``data_only``, which rebuilds data and nothing else from any bytes.
"""

from __future__ import annotations

import ctypes
import pickle
import struct
from collections.abc import Sequence
from typing import Any

import torch

from mpidist.comm.serialization import (
    data_reader,
    data_writer,
    tensor_pickle,
    tensor_rebuild,
    tensor_table,
)
from mpidist.comm.serialization.tensor_format import Buffer, Tabled
from mpidist.errors import FrameError, NotPlainData

_MAGIC = b"MPIF"
_VERSION = 3
_FIXED = struct.Struct("<4sHHQQ")
_LENGTH = struct.Struct("<Q")
_TABLE = struct.Struct("<I")
PICKLE, DATA, REFUSAL = range(3)  # formats of the content
HEADER_BYTES = _FIXED.size
_MAX_BUFFERS = 1 << 20  # more than any object has; a larger number is damage
_MAX_BYTES = 1 << 50  # of all parts; beyond the memory of any machine

Message = tuple[bytes, list[memoryview]]


class RefusedError(FrameError):
    """The sender could not send its object; the text is the sender's reason."""


class _HostSink(tensor_pickle.Sink):
    """Leaves CUDA tensors to torch's pickling, because a receiver cannot choose their device."""

    __slots__ = ()

    def reduced(self, obj: object) -> Any:
        """See ``tensor_pickle.Sink``."""
        if isinstance(obj, torch.Tensor) and not obj.is_cpu:
            tensor_table.require_layout(obj)
            return NotImplemented
        return super().reduced(obj)


def encode(obj: object, data_only: bool = False) -> Message:
    """Encode an object as a header and the memory that follows.

    Args:
        data_only: Write data, not a pickle.

    Returns:
        The header with all lengths, and [table and content, buffer, …] in sending order.

    Raises:
        NotPlainData: ``data_only``, and the object holds something else; the error has its place.
        Exception: What pickle raises for an object it cannot handle.
    """
    if not data_only:
        sink = _HostSink()
        content = tensor_pickle.dumps(obj, sink)
        return _message(PICKLE, sink.objects, content, sink.buffers)
    objects: list[Tabled] = []
    content = data_writer.dumps(obj, objects)
    for tensor in objects:
        if isinstance(tensor, torch.Tensor) and not tensor.is_cpu:
            raise NotPlainData(
                f"a tensor of shape {tuple(tensor.shape)} on {tensor.device}: objects that travel "
                "as data hold tensors in host "
                "memory; give tensor.cpu()"
            )
    return _message(DATA, objects, content, ())


def refusal(reason: str) -> Message:
    """Return the message that replaces an object which cannot be sent.

    Decoding raises ``RefusedError`` with ``reason``.
    """
    return _message(REFUSAL, (), data_writer.dumps(reason, []), ())


def _message(
    kind: int, objects: Sequence[Tabled], content: bytes, buffers: Sequence[pickle.PickleBuffer]
) -> Message:
    table, parts, _ = tensor_table.describe(objects) if objects else (b"", [], [])
    body = [memoryview(_TABLE.pack(len(table)) + table + content)]
    body += [
        _memory(part) if isinstance(part, torch.Tensor) else memoryview(part).cast("B")
        for part in parts
    ]
    body += [buffer.raw() for buffer in buffers]
    header = _FIXED.pack(_MAGIC, _VERSION, kind, len(body) - 1, body[0].nbytes)
    return header + b"".join(_LENGTH.pack(part.nbytes) for part in body[1:]), body


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a flat tensor, which the view keeps alive.

    ``numpy()`` would prevent the tensor from being resized from then on.
    """
    memory: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor
    return memoryview(memory).cast("B")


def buffer_count(fixed: Buffer) -> int:
    """Read the number of buffers from the first ``HEADER_BYTES`` bytes.

    The header has 8 more bytes for each buffer.

    Raises:
        FrameError: The bytes are not a header.
    """
    if len(fixed) < HEADER_BYTES:
        raise FrameError(f"truncated frame: {len(fixed)} of {HEADER_BYTES} header bytes")
    magic, version, kind, buffers, _ = _FIXED.unpack_from(fixed)
    if magic != _MAGIC:
        raise FrameError(f"not a frame: starts with {bytes(magic)!r}")
    if version != _VERSION:
        raise FrameError(
            f"frame version {version}; this side speaks {_VERSION}: all ranks need the same mpidist"
        )
    if kind not in (PICKLE, DATA, REFUSAL):
        raise FrameError(f"frame of an unknown format, {kind}")
    if buffers > _MAX_BUFFERS:
        raise FrameError(f"frame announces {buffers} buffers; at most {_MAX_BUFFERS} are accepted")
    return int(buffers)


def body_lengths(header: Buffer) -> list[int]:
    """Read the length in bytes of the content with its table, and of each buffer.

    Raises:
        FrameError: The bytes are truncated or not a header.
    """
    buffers = buffer_count(header)
    if len(header) < HEADER_BYTES + _LENGTH.size * buffers:
        raise FrameError(
            f"truncated frame: {buffers} buffers announced, lengths cut off after {len(header)} "
            "bytes"
        )
    first = _FIXED.unpack_from(header)[4]
    lengths = [
        first,
        *(_LENGTH.unpack_from(header, HEADER_BYTES + _LENGTH.size * i)[0] for i in range(buffers)),
    ]
    if sum(lengths) > _MAX_BYTES:
        raise FrameError(f"frame announces {sum(lengths)} bytes; no machine holds them")
    return lengths


def decode(header: Buffer, body: Sequence[Buffer], data_only: bool = False) -> Any:
    """Rebuild the object from its header and [table and content, buffer, …].

    Tensors keep the memory of the buffers as their own.

    Args:
        header: At least up to the format; checked by ``body_lengths`` before.
        data_only: Refuse a pickle without reading it.

    Raises:
        FrameError: The bytes do not rebuild an object, or are a pickle.
        RefusedError: The sender could not send its object.
    """
    kind = _FIXED.unpack_from(header)[2]
    if data_only and kind == PICKLE:
        raise FrameError(
            "a pickle came, which may run code as it is read; this rank reads data alone "
            "(MPIDIST_TRUST=data, or "
            "data_only=True), and all ranks need the same setting"
        )
    try:
        first = memoryview(body[0])
        # In-band parts may be read-only; a tensor must own writable memory.
        views = [memoryview(part) for part in body[1:]]
        parts = [memoryview(bytearray(view)) if view.readonly else view for view in views]
        objects, used, end = _read_table(first, parts, is_strict=kind != PICKLE)
        content = first[end:]
        if kind == PICKLE:
            return tensor_pickle.loads(content, objects, parts[used:])
        if used != len(parts):
            raise FrameError(f"{len(parts)} buffers came; its table describes {used}")
        read = data_reader.loads(content, objects)
    except (pickle.UnpicklingError, EOFError, struct.error) as error:
        raise FrameError(f"the content of a frame is damaged: {error}") from error
    if kind == REFUSAL:
        raise RefusedError(str(read))
    return read


def _read_table(
    first: memoryview, parts: Sequence[memoryview], is_strict: bool
) -> tuple[list[Tabled], int, int]:
    """Return the objects of the table, how many parts they use, and the end of the table."""
    (table_bytes,) = _TABLE.unpack_from(first)
    end = _TABLE.size + table_bytes
    if end > first.nbytes:
        raise FrameError(
            f"frame announces a table of {table_bytes} bytes; {first.nbytes - _TABLE.size} have "
            "come"
        )
    if not table_bytes:
        return [], 0, end
    objects, used, reached = tensor_rebuild.read(first, _TABLE.size, parts, is_strict)
    if reached != end:
        raise FrameError(
            f"frame announces a table of {table_bytes} bytes, which has {reached - _TABLE.size}"
        )
    return objects, used, end


def to_bytes(obj: object, data_only: bool = False) -> bytearray:
    """Encode an object as contiguous bytes; see ``encode``."""
    header, body = encode(obj, data_only)
    return bytearray().join([header, *body])


def from_bytes(data: Buffer, data_only: bool = False) -> Any:
    """Rebuild an object from contiguous bytes.

    Raises:
        FrameError: Truncated, too long, or a pickle with ``data_only``.
        RefusedError: The sender could not send its object.
    """
    return decode(*split(data), data_only)


def split(data: Buffer) -> tuple[memoryview, list[memoryview]]:
    """Return header and body of a frame in contiguous bytes.

    Raises:
        FrameError: Truncated or too long.
    """
    view = memoryview(data)
    lengths = body_lengths(view)
    place = HEADER_BYTES + _LENGTH.size * (len(lengths) - 1)
    if view.nbytes != place + sum(lengths):
        raise FrameError(
            f"frame of {view.nbytes} bytes; its header announces {place + sum(lengths)}"
        )
    body = []
    for length in lengths:
        body.append(view[place : place + length])
        place += length
    return view, body
