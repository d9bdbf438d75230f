"""Wire description of tensors and arrays: a table with one row each, and the memory that is sent.

Small whole host tensors are in their rows (``inline_rows``). All others refer to a part: memory
that the transport sends and the receiver gets as it is. Only the memory that the tensors of a
storage cover is sent, and only once: views that overlap or adjoin share memory at the receiver too,
and gaps between distant views are not sent.

The layout is in ``tensor_format``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch

from mpidist.comm.serialization.inline_rows import inline_table
from mpidist.comm.serialization.tensor_format import (
    ARRAY,
    ARRAY_NUMBERS,
    BYTEARRAY,
    COALESCED,
    COO,
    COUNTS,
    DENSE,
    DTYPE_NUMBERS,
    HOST,
    OFFSET,
    PARAMETER,
    REQUIRES_GRAD,
    WHOLE,
    Part,
    Tabled,
    row,
)
from mpidist.comm.serialization.tensor_spans import (
    clusters,
    clusters_apart,
    is_folded,
    span,
)

Tensor = torch.Tensor
# Unused bytes between the elements of a tensor that may be sent, in addition to the tensor's size.
_WASTE_BYTES = 64 << 10
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def is_describable(obj: Any) -> bool:
    """Return whether an object can be a row: a plain tensor, parameter, array or bytearray."""
    kind = type(obj)
    if kind is np.ndarray:
        return obj.dtype in ARRAY_NUMBERS and obj.flags.c_contiguous and obj.dtype.isnative
    if kind is bytearray:
        return True
    if kind is not Tensor and kind is not torch.nn.Parameter:
        return False
    if obj.__dict__ or not (obj.is_cpu or obj.is_cuda) or obj.is_nested:
        return False
    return obj.dtype in DTYPE_NUMBERS and obj.layout in (torch.strided, torch.sparse_coo)


def require_layout(tensor: Tensor) -> None:
    """Require that a tensor is neither quantized nor compressed sparse.

    torch's pickle of a compressed one is read without a check of its indices, and torch keeps what
    was read alive.

    Raises:
        TypeError: It is.
    """
    if tensor.is_quantized:
        raise TypeError(
            f"a quantized tensor ({tensor.dtype}) cannot be sent: send its dequantize(), or its "
            "int_repr() with scale and zero point"
        )
    if tensor.layout in _COMPRESSED:
        raise TypeError(
            f"a tensor of layout {tensor.layout} cannot be sent: send its to_sparse_coo() or its "
            "to_dense()"
        )


def describe(
    objects: Sequence[Tabled], device_map: Mapping[int, int] | None = None, is_dense: bool = False
) -> tuple[bytes, list[Part], list[int | None]]:
    """Describe objects for which ``is_describable`` holds, and list the memory to be sent.

    Args:
        device_map: From this rank's CUDA device indices to the receiver's; ``HOST`` stands for the
            memory of the host, where host tensors stay unless it is named.
        is_dense: For a strict reader (``tensor_rebuild``): a tensor with more elements than memory,
            for example an expanded one, is copied without strides; bools share no memory with other
            dtypes, and sparse tensors share none at all.

    Returns:
        The table, the parts (contiguous tensors or buffers), and the receiver's device index of
            each part.

    Raises:
        ValueError: A tensor is on a device that ``device_map`` does not name.
    """
    stays_on_host = not device_map or HOST not in device_map
    table = inline_table(objects) if stays_on_host else None
    if table is not None:
        return b"".join(table), [], []
    if stays_on_host and len(objects) == 1 and _is_whole(objects[0]):
        # The content of most messages with large tensors.
        obj = objects[0]
        flags = WHOLE | REQUIRES_GRAD * obj.requires_grad | PARAMETER * (type(obj) is not Tensor)
        return (
            COUNTS.pack(1, 1) + row(DTYPE_NUMBERS[obj.dtype], DENSE, flags, 0, obj.shape),
            [obj],
            [None],
        )
    layout = _TableLayout(device_map or {}, is_dense)
    heads: list[Any] = [layout.add(obj) for obj in objects]
    layout.lay_out()
    joined = b"".join(_flat(heads, layout.rows))
    return COUNTS.pack(len(objects), len(layout.parts)) + joined, layout.parts, layout.devices


def _is_whole(obj: Tabled) -> TypeGuard[Tensor]:
    return (
        isinstance(obj, Tensor)
        and obj.is_cpu
        and obj.layout is torch.strided
        and obj.dtype in DTYPE_NUMBERS
        and obj.is_contiguous()
        and not (obj.is_neg() or obj.is_conj())
    )


class _TableLayout:
    """Rows and parts of objects that are not inline."""

    def __init__(self, device_map: Mapping[int, int], is_dense: bool) -> None:
        self.parts: list[Part] = []
        self.devices: list[int | None] = []
        self.rows: list[bytes] = []  # of the dense tensors
        self._device_map = device_map
        self._is_dense = is_dense
        self._tensors: list[tuple[Tensor, int]] = []  # (resolved, flags)
        self._alone: set[int] = set()  # indices of tensors that share no memory

    def add(self, obj: Tabled) -> Any:
        """Add an object; return its row, or a tuple of bytes and indices into ``rows``."""
        if isinstance(obj, (np.ndarray, bytearray)):
            return self._add_array(obj)
        flags = REQUIRES_GRAD * obj.requires_grad | PARAMETER * (type(obj) is not Tensor)
        if obj.layout is torch.strided:
            tensor = _resolved(obj)
            self._tensors.append(
                (tensor.contiguous() if self._is_dense and is_folded(tensor) else tensor, flags)
            )
            return len(self._tensors) - 1
        plain, shape = obj.detach(), tuple(obj.shape)
        flags |= COALESCED * obj.is_coalesced()
        head = row(DTYPE_NUMBERS[obj.dtype], COO, flags, 0, shape)
        return head, self._inner(plain._indices()), self._inner(plain._values())

    def _inner(self, tensor: Tensor) -> int:
        """Add a dense tensor of a sparse one."""
        self._alone.add(len(self._tensors))
        self._tensors.append((tensor.contiguous() if self._is_dense else _resolved(tensor), 0))
        return len(self._tensors) - 1

    def _add_array(self, obj: np.ndarray | bytearray) -> bytes:
        self.devices.append(None)
        if isinstance(obj, bytearray):
            # A view would prevent the caller from resizing it until the send is complete.
            self.parts.append(bytes(obj))
            return row(0, BYTEARRAY, 0, len(self.parts) - 1, ())
        self.parts.append(obj.reshape(-1).view(np.uint8).data if obj.size else b"")
        return row(ARRAY_NUMBERS[obj.dtype], ARRAY, 0, len(self.parts) - 1, obj.shape)

    def lay_out(self) -> None:
        """Choose the memory that is sent for the dense tensors, and write their rows."""
        self.rows = [b""] * len(self._tensors)
        tensors = [tensor for tensor, _ in self._tensors]
        for members in (
            clusters_apart(tensors, self._alone) if self._is_dense else clusters(tensors)
        ):
            first, flags = self._tensors[members[0]]
            low, high = span(first)
            if len(members) == 1:
                if high - low > 2 * first.nbytes + _WASTE_BYTES:
                    first = first.contiguous()  # scattered, so gaps are not sent
                    low, high = span(first)
                if first.is_contiguous():
                    number = DTYPE_NUMBERS[first.dtype]
                    self.rows[members[0]] = row(
                        number, DENSE, flags | WHOLE, len(self.parts), first.shape
                    )
                    self._add_memory(first, low, high)
                    continue
            for place in members[1:]:
                start, end = span(self._tensors[place][0])
                low, high = min(low, start), max(high, end)
            # Offsets are whole elements of any dtype; complex128 is the widest.
            low -= (low - first.untyped_storage().data_ptr()) % 16
            for place in members:
                tensor, flags = self._tensors[place]
                offset = (tensor.data_ptr() - low) // tensor.element_size() if tensor.numel() else 0
                head = row(DTYPE_NUMBERS[tensor.dtype], DENSE, flags, len(self.parts), tensor.shape)
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
        index = HOST if tensor.is_cpu else tensor.device.index
        to = self._device_map.get(index, HOST if tensor.is_cpu else None)
        if to is None:
            raise ValueError(
                f"a tensor on {tensor.device} cannot be sent: the device map for this worker names "
                f"{sorted(set(self._device_map) - {HOST}) or 'no device'}; set it with "
                "RpcBackendOptions.set_device_map, or send tensor.cpu()"
            )
        self.devices.append(None if to == HOST else to)


def _flat(heads: Iterable[Any], rows: Sequence[bytes]) -> Iterable[bytes]:
    for head in heads:
        if type(head) is bytes:
            yield head
        elif type(head) is int:
            yield rows[head]
        else:
            yield from _flat(head, rows)


def _resolved(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor
