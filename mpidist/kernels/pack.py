"""Copies between many tensors and one flat buffer, in one launch, with a factor and a cast.

``cuda/pack.cu`` is the kernel; the torch twins in this file give the same numbers.

Letters: N elements of all tensors together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import torch

from mpidist.kernels.launch import (
    NAMES,
    blocks_of,
    chunk_numel,
    compute_dtype,
    has_kernels,
    launch,
    scalar,
    stream_of,
    to_device,
)
from mpidist.kernels.view import byte_view, flat_view

Tensor = torch.Tensor

_CACHED_TABLES = 256  # entries, one for each list of tensors

# Device tables, with the kernel's suffix, by everything that the checks and the table depend on.
_tables: OrderedDict[tuple[object, ...], tuple[str, Tensor]] = OrderedDict()
_dtype_of = attrgetter("dtype")


def pack(tensors: Sequence[Tensor], flat: Tensor, scale: float = 1.0) -> Tensor:
    """Copy tensors, times ``scale``, into a flat buffer, one after another.

    Blocks: no; on CUDA the work is queued on the current stream.

    Args:
        tensors: Dense tensors (each element once, no gaps) of one dtype on one device; read in the
            order of their memory.
        flat: Contiguous tensor of N elements on the same device. The dtypes may differ if both are
            float16, bfloat16 or float32.
        scale: Factor, applied in fp32 (fp64 for fp64) before rounding once; 1 for other dtypes.

    Returns:
        ``flat``.

    Raises:
        ValueError: Numbers of elements, devices or layouts do not fit.
        TypeError: The dtypes differ and have no kernel, or cannot be scaled.
    """
    if has_kernels(flat):
        _launch("pack", tensors, flat, scale)
    else:
        parts = _checked("pack", tensors, flat, scale)
        _copied(flat.view(-1).split([part.numel() for part in parts]), parts, scale)
    return flat


def unpack(flat: Tensor, tensors: Sequence[Tensor], scale: float = 1.0) -> None:
    """Copy a flat buffer, times ``scale``, into tensors: the inverse of ``pack``."""
    if has_kernels(flat):
        _launch("unpack", tensors, flat, scale)
    else:
        parts = _checked("unpack", tensors, flat, scale)
        _copied(parts, flat.view(-1).split([part.numel() for part in parts]), scale)


def in_memory_order(dense: Tensor) -> Tensor:
    """Return a flat view of a dense tensor's elements in memory order.

    Raises:
        ValueError: It has gaps, or an element twice.
    """
    if dense.is_contiguous():
        return flat_view(dense)
    expected = 1
    for stride, size in sorted(zip(dense.stride(), dense.shape, strict=True)):
        if size != 1 and stride != expected:
            raise ValueError(
                f"a tensor of shape {tuple(dense.shape)} and strides {dense.stride()} is not dense"
            )
        expected *= size
    return dense.as_strided((dense.numel(),), (1,), dense.storage_offset())


def table(parts: Sequence[Tensor], chunk: int) -> np.ndarray:
    """Return the kernel's table, one row (address, offset in the flat buffer, elements) per chunk.

    Args:
        parts: Tensors of one dtype, each element once and no gaps.
        chunk: Elements of a chunk, at most; one block copies one chunk.

    Returns:
        int64, shape (chunks, 3).
    """
    numels = np.fromiter(map(Tensor.numel, parts), np.int64, len(parts))
    addresses = np.fromiter(map(Tensor.data_ptr, parts), np.int64, len(parts))
    first, owners = blocks_of((-(-numels // chunk)).tolist())
    within = (np.arange(len(owners)) - first[owners]) * chunk
    starts = np.cumsum(numels) - numels
    rows = np.empty((len(owners), 3), np.int64)
    rows[:, 0] = addresses[owners] + within * (parts[0].element_size() if parts else 1)
    rows[:, 1] = starts[owners] + within
    rows[:, 2] = np.minimum(numels[owners] - within, chunk)
    return rows


def _checked(name: str, tensors: Sequence[Tensor], flat: Tensor, scale: float) -> list[Tensor]:
    if not flat.is_contiguous() or flat.numel() != sum(t.numel() for t in tensors):
        raise ValueError(
            f"{name} needs a contiguous buffer of {sum(t.numel() for t in tensors)} elements; got "
            f"shape {tuple(flat.shape)}"
        )
    dtypes = {t.dtype for t in tensors}
    if any(t.device != flat.device for t in tensors) or len(dtypes) > 1:
        raise ValueError(
            f"{name} needs tensors of one dtype on {flat.device}; got "
            f"{sorted({(str(t.device), str(t.dtype)) for t in tensors})}"
        )
    for dtype in dtypes:
        is_known = (
            dtype in NAMES
            and flat.dtype in NAMES
            and compute_dtype(dtype) == compute_dtype(flat.dtype)
        )
        if not is_known and (dtype != flat.dtype or scale != 1):
            raise TypeError(f"{name} neither casts nor scales from {dtype} to {flat.dtype}")
    if any(t.is_conj() or t.is_neg() for t in (*tensors, flat)):
        raise ValueError(
            f"{name} copies memory as it lies: resolve_conj() and resolve_neg() come first"
        )
    return [in_memory_order(t.detach()) for t in tensors]


def _launch(name: str, tensors: Sequence[Tensor], flat: Tensor, scale: float) -> None:
    suffix, parts = _cached_table(name, tensors, flat, scale)
    if len(parts):
        args = (parts.data_ptr(), flat.data_ptr(), scalar(scale, flat.dtype))
        launch("pack.cu", f"{name}_{suffix}", flat.device, len(parts), args)


def _cached_table(
    name: str, tensors: Sequence[Tensor], flat: Tensor, scale: float
) -> tuple[str, Tensor]:
    """Return the kernel's suffix and its table on the device; new lists of tensors are checked.

    The same tensors recur in every step, and checking 100 of them takes longer than the kernel. An
    address alone does not identify the elements at it, so the key has everything that the checks
    read.
    """
    key = (
        stream_of(flat.device),  # the table was copied on this stream
        flat.dtype,
        flat.get_device(),
        flat.numel(),
        flat.is_contiguous(),
        flat.is_neg(),
        flat.is_complex() and (flat.is_conj(), tuple(map(Tensor.is_conj, tensors))),
        scale == 1,
        tuple(map(Tensor.data_ptr, tensors)),
        tuple(map(Tensor.size, tensors)),
        tuple(map(Tensor.stride, tensors)),
        tuple(map(_dtype_of, tensors)),
        tuple(map(Tensor.get_device, tensors)),
        tuple(map(Tensor.is_neg, tensors)),
    )
    found = _tables.pop(key, None)
    if found is None:
        found = _prepared(_checked(name, tensors, flat, scale), flat)
        while len(_tables) >= _CACHED_TABLES:
            _tables.popitem(last=False)
    _tables[key] = found
    return found


def _prepared(parts: Sequence[Tensor], flat: Tensor) -> tuple[str, Tensor]:
    dtype = parts[0].dtype if parts else flat.dtype
    suffix = f"{NAMES.get(dtype, 'byte')}_{NAMES.get(flat.dtype, 'byte')}"
    if dtype in NAMES:
        rows = table(parts, chunk_numel(dtype, flat.dtype))
    else:
        rows = table([byte_view(part) for part in parts], chunk_numel(torch.uint8))
    return suffix, to_device(rows, flat.device) if len(rows) else torch.from_numpy(rows)


def _copied(targets: Sequence[Tensor], sources: Sequence[Tensor], scale: float) -> None:
    if not targets:
        return
    if scale != 1:
        wide = compute_dtype(targets[0].dtype)
        sources = [source.to(wide) * scale for source in sources]
    with torch.no_grad():
        torch._foreach_copy_(list(targets), list(sources))
