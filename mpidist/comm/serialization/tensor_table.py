"""Wire description of tensors and arrays: a table with one row each, and the memory that travels for them.

Small whole host tensors stand in their row. All else refers to a part: memory that the transport
takes and gives back. Of a storage, only what the tensors cover travels, and once: views that
overlap or adjoin still share memory at the receiver; far apart ones do not bring what lies between.

The layout is in ``tensor_format``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mpidist.comm.memory.buffer import memory as _memory
from mpidist.comm.serialization.tensor_format import (
    ARRAY,
    ARRAY_NUMBERS,
    BY_ROW,
    BYTEARRAY,
    COALESCED,
    COMPRESSED,
    COO,
    COUNTS,
    DENSE,
    DTYPE_NUMBERS,
    INLINE,
    OFFSET,
    PARAMETER,
    PER_CHANNEL,
    PER_TENSOR,
    QUANTIZED,
    REQUIRES_GRAD,
    ROW,
    SCALE,
    WHOLE,
)
from mpidist.comm.serialization.tensor_spans import (
    clusters,
    clusters_apart,
    is_folded,
    overlap,
    span,
)

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
_STRIDED = torch.strided
_MOST_HEADS = 4096  # kinds of small tensors; a job that sends more starts again
_ONE = COUNTS.pack(1, 0)
# By dtype, shape, class and requires_grad: what stands before the elements.
_heads: dict[Any, tuple[bytes | None, int, bytes]] = {}

# a tensor up to this size stands in its row: the message is still one eager message
INLINE_BYTES = 30 << 10
# what may travel unused between a tensor's elements, beside as much as the tensor itself
_WASTE_BYTES = 64 << 10


def is_describable(obj: Any) -> bool:
    """Say whether an object can be a row: a tensor, parameter, array or bytearray of a plain kind."""
    kind = type(obj)
    if kind is np.ndarray:
        return obj.dtype in ARRAY_NUMBERS and obj.flags.c_contiguous and obj.dtype.isnative
    if kind is bytearray:
        return True
    if kind is not Tensor and kind is not torch.nn.Parameter:
        return False
    if obj.__dict__ or not (obj.is_cpu or obj.is_cuda) or obj.is_nested:
        return False
    if obj.layout is not torch.strided:
        return obj.layout is torch.sparse_coo or obj.layout in COMPRESSED
    return obj.dtype in DTYPE_NUMBERS or obj.dtype in QUANTIZED


def described(
    objects: Sequence[Any], device_map: Mapping[int, int] | None = None, is_dense: bool = False
) -> tuple[bytes, list[Any], list[int | None]]:
    """Describe objects for which ``is_describable`` holds, and name the memory that travels for them.

    Args:
        device_map: From this rank's CUDA device indices to the receiver's.
        is_dense: For a strict reader (``tensor_rebuild``): a tensor with more elements than its
            memory holds, an expanded one say, goes as a copy without strides; bools share no memory
            with other dtypes, nor do sparse and quantized tensors share any.

    Returns:
        The table, the parts (contiguous tensors or buffers), and the receiver's device index of
        each part.

    Raises:
        ValueError: A tensor on a device that ``device_map`` does not name.
    """
    table = inline_table(objects)
    if table is not None:
        return b"".join(table), [], []
    if len(objects) == 1 and _is_whole(objects[0]):
        # What most messages with large tensors hold.
        obj = objects[0]
        flags = WHOLE | REQUIRES_GRAD * obj.requires_grad | PARAMETER * (type(obj) is not Tensor)
        return (
            COUNTS.pack(1, 1) + _row(DTYPE_NUMBERS[obj.dtype], DENSE, flags, 0, obj.shape),
            [obj],
            [None],
        )
    layout = _Layout(device_map or {}, is_dense)
    heads: list[Any] = [layout.add(obj) for obj in objects]
    layout.lay_out()
    joined = b"".join(_flat(heads, layout.rows))
    return COUNTS.pack(len(objects), len(layout.parts)) + joined, layout.parts, layout.devices


def lone_table(obj: Any) -> tuple[Any, ...] | None:
    """Return the table of one small whole host tensor, as bytes and buffers to be joined at once; None for any other object.

    The buffers are the tensor's own memory. What most messages with tensors hold;
    ``_add_inline_row`` written out.
    """
    kind = type(obj)
    if (
        (kind is not Tensor and kind is not Parameter)
        or not obj.is_cpu
        or obj.layout is not _STRIDED
    ):
        return None
    key = obj.dtype, obj.shape, kind, obj.requires_grad
    head, nbytes, lone = _heads.get(key) or _head_of(*key)
    if (
        head is None
        or not obj.is_contiguous()
        or obj.is_neg()
        or obj.__dict__
        or (nbytes < 0 and obj.is_conj())
    ):
        return None
    # Not numpy(): a tensor whose memory it has seen cannot be resized any more.
    return (lone, _memory(obj.data_ptr(), abs(nbytes))) if nbytes else (lone,)


def inline_table(objects: Sequence[Any]) -> Sequence[Any] | None:
    """Return the table of small whole host tensors that share no memory, as ``lone_table``; None if any object is another."""
    if len(objects) == 1:
        return lone_table(objects[0])
    pieces = [COUNTS.pack(len(objects), 0)]
    for obj in objects:
        if not _add_inline_row(obj, pieces):
            return None
    return None if overlap(objects) else pieces


def _is_whole(obj: Any) -> bool:
    return (
        isinstance(obj, Tensor)
        and obj.is_cpu
        and obj.layout is _STRIDED
        and obj.dtype in DTYPE_NUMBERS
        and obj.is_contiguous()
        and not (obj.is_neg() or obj.is_conj())
    )


def _add_inline_row(obj: Any, pieces: list[Any]) -> bool:
    kind = type(obj)
    if (
        (kind is not Tensor and kind is not Parameter)
        or not obj.is_cpu
        or obj.layout is not _STRIDED
    ):
        return False
    key = obj.dtype, obj.shape, kind, obj.requires_grad
    head, nbytes, _ = _heads.get(key) or _head_of(*key)
    if (
        head is None
        or not obj.is_contiguous()
        or obj.is_neg()
        or obj.__dict__
        or (nbytes < 0 and obj.is_conj())
    ):
        return False
    pieces.append(head)
    if nbytes:
        pieces.append(_memory(obj.data_ptr(), abs(nbytes)))
    return True


def _head_of(
    dtype: torch.dtype, shape: torch.Size, kind: type, requires_grad: bool
) -> tuple[bytes | None, int, bytes]:
    """Return an inline row up to its elements, None if it cannot be one; their bytes, below 0 if complex; a table up to there."""
    number = DTYPE_NUMBERS.get(dtype)
    nbytes = shape.numel() * dtype.itemsize
    head = None
    if number is not None and nbytes <= INLINE_BYTES and len(shape) < 256:
        flags = INLINE | WHOLE | REQUIRES_GRAD * requires_grad | PARAMETER * (kind is not Tensor)
        head = _row(number, DENSE, flags, 0, shape)
    if len(_heads) >= _MOST_HEADS:
        _heads.clear()
    found = _heads[dtype, shape, kind, requires_grad] = (
        head,
        -nbytes if dtype.is_complex else nbytes,
        _ONE + (head or b""),
    )
    return found


class _Layout:
    """The memory of objects that do not stand in their rows."""

    def __init__(self, device_map: Mapping[int, int], is_dense: bool) -> None:
        self.parts: list[Any] = []
        self.devices: list[int | None] = []
        self.rows: list[bytes] = []  # of the dense tensors
        self._device_map = device_map
        self._is_dense = is_dense
        self._tensors: list[tuple[Tensor, int]] = []  # (resolved, flags)
        self._alone: set[int] = set()  # places of those that share no memory

    def add(self, obj: Any) -> Any:
        """Take an object up; return its row, or a tuple of what its row consists of: bytes, and places in ``rows``."""
        if type(obj) is np.ndarray or type(obj) is bytearray:
            return self._add_array(obj)
        flags = REQUIRES_GRAD * obj.requires_grad | PARAMETER * (type(obj) is not Tensor)
        if obj.layout is torch.strided and not obj.is_quantized:
            tensor = _resolved(obj)
            self._tensors.append(
                (tensor.contiguous() if self._is_dense and is_folded(tensor) else tensor, flags)
            )
            return len(self._tensors) - 1
        plain, shape = obj.detach(), tuple(obj.shape)
        if obj.layout is torch.sparse_coo:
            head = _row(
                DTYPE_NUMBERS[obj.dtype], COO, flags | COALESCED * obj.is_coalesced(), 0, shape
            )
            return head, self._inner(plain._indices()), self._inner(plain._values())
        if obj.layout in COMPRESSED:
            by_row = obj.layout in BY_ROW
            compressed = plain.crow_indices() if by_row else plain.ccol_indices()
            indices = plain.col_indices() if by_row else plain.row_indices()
            head = _row(DTYPE_NUMBERS[obj.dtype], COMPRESSED[obj.layout], flags, 0, shape)
            return head, self._inner(compressed), self._inner(indices), self._inner(plain.values())
        if obj.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            head = _row(0, PER_TENSOR, flags, 0, shape) + SCALE.pack(
                obj.q_scale(), obj.q_zero_point()
            )
            return head, self._inner(obj.int_repr())
        head = _row(0, PER_CHANNEL, flags, 0, shape) + OFFSET.pack(obj.q_per_channel_axis())
        scales, zeros = obj.q_per_channel_scales(), obj.q_per_channel_zero_points()
        return head, self._inner(obj.int_repr()), self._inner(scales), self._inner(zeros)

    def _inner(self, tensor: Tensor) -> int:
        """Take up a dense tensor of a sparse or quantized one."""
        self._alone.add(len(self._tensors))
        self._tensors.append((tensor.contiguous() if self._is_dense else _resolved(tensor), 0))
        return len(self._tensors) - 1

    def _add_array(self, obj: Any) -> bytes:
        if type(obj) is bytearray:
            # a view would keep the caller from resizing it until MPI's send is tested
            self.parts.append(bytes(obj))
        else:
            self.parts.append(obj.reshape(-1).view(np.uint8).data if obj.size else b"")
        self.devices.append(None)
        if type(obj) is bytearray:
            return _row(0, BYTEARRAY, 0, len(self.parts) - 1, ())
        return _row(ARRAY_NUMBERS[obj.dtype], ARRAY, 0, len(self.parts) - 1, obj.shape)

    def lay_out(self) -> None:
        """Say which memory travels for the dense tensors, and write their rows."""
        self.rows = [b""] * len(self._tensors)
        tensors = [tensor for tensor, _ in self._tensors]
        for members in (
            clusters_apart(tensors, self._alone) if self._is_dense else clusters(tensors)
        ):
            first, flags = self._tensors[members[0]]
            low, high = span(first)
            if len(members) == 1:
                if high - low > 2 * first.nbytes + _WASTE_BYTES:
                    first = first.contiguous()  # scattered: what lies between need not travel
                    low, high = span(first)
                if first.is_contiguous():
                    number = DTYPE_NUMBERS[first.dtype]
                    self.rows[members[0]] = _row(
                        number, DENSE, flags | WHOLE, len(self.parts), first.shape
                    )
                    self._add_memory(first, low, high)
                    continue
            for place in members[1:]:
                start, end = span(self._tensors[place][0])
                low, high = min(low, start), max(high, end)
            # whole elements of any type: complex128 is the widest
            low -= (low - first.untyped_storage().data_ptr()) % 16
            for place in members:
                tensor, flags = self._tensors[place]
                offset = (tensor.data_ptr() - low) // tensor.element_size() if tensor.numel() else 0
                head = _row(
                    DTYPE_NUMBERS[tensor.dtype], DENSE, flags, len(self.parts), tensor.shape
                )
                self.rows[place] = (
                    head + OFFSET.pack(offset) + struct.pack(f"<{tensor.dim()}q", *tensor.stride())
                )
            self._add_memory(first, low, high)

    def _add_memory(self, tensor: Tensor, low: int, high: int) -> None:
        if tensor.nbytes == high - low and tensor.is_contiguous():
            self.parts.append(tensor)
        else:
            storage = tensor.untyped_storage()
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            self.parts.append(flat.set_(storage, low - storage.data_ptr(), (high - low,), (1,)))
        if tensor.is_cpu:
            self.devices.append(None)
            return
        index = tensor.device.index
        if index not in self._device_map:
            raise ValueError(
                f"a tensor on {tensor.device} cannot be sent: the device map for this worker names "
                f"{sorted(self._device_map) or 'no device'}; set it with "
                "RpcBackendOptions.set_device_map, or send tensor.cpu()"
            )
        self.devices.append(self._device_map[index])


def _flat(heads: Iterable[Any], rows: Sequence[bytes]) -> Iterable[bytes]:
    for head in heads:
        if type(head) is bytes:
            yield head
        elif type(head) is int:
            yield rows[head]
        else:
            yield from _flat(head, rows)


def _row(number: int, form: int, flags: int, part: int, shape: Sequence[int]) -> bytes:
    return ROW.pack(number, form, flags, len(shape), part) + struct.pack(f"<{len(shape)}q", *shape)


def _resolved(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor
