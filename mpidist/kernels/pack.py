"""Many tensors into one flat buffer, and back: one launch whatever their number, with a factor and a cast on the way.

``cuda/pack.cu`` does it on the device; the torch twins in this file give the same numbers.

Letters: N elements of all tensors together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from mpidist.kernels.launch import NAMES, blocks_of, chunk_numel, compute_dtype, has_kernels, launch, scalar, stream_of, to_device
from mpidist.kernels.view import byte_view, flat_view

Tensor = torch.Tensor

_REMEMBERED = 256  # tables on devices

_tables: OrderedDict[tuple[object, ...], tuple[Tensor, Tensor]] = OrderedDict()


def pack(tensors: Sequence[Tensor], flat: Tensor, scale: float = 1.0) -> Tensor:
    """Copy tensors, times ``scale``, into a flat buffer, one behind the other.

    Blocks: not; on CUDA the work is queued on the current stream.

    Args:
        tensors: Dense tensors (each element once, no gaps) of one dtype on one device; taken in the order of their memory.
        flat: Contiguous tensor of N elements on the same device. Its dtype may be another if both are float16, bfloat16 or
            float32.
        scale: Factor, applied in fp32 (fp64 for fp64) before the one rounding; 1 for other dtypes.

    Returns:
        ``flat``.

    Raises:
        ValueError: Numbers of elements, devices or layouts do not fit.
        TypeError: The dtypes differ and have no kernel, or cannot be scaled.
    """
    parts = _checked("pack", tensors, flat, scale)
    if not _launched("pack", parts, flat, scale):
        _copied(flat.view(-1).split([part.numel() for part in parts]), parts, scale)
    return flat


def unpack(flat: Tensor, tensors: Sequence[Tensor], scale: float = 1.0) -> None:
    """Copy a flat buffer, times ``scale``, into tensors: the inverse of ``pack``, with the same arguments."""
    parts = _checked("unpack", tensors, flat, scale)
    if not _launched("unpack", parts, flat, scale):
        _copied(parts, flat.view(-1).split([part.numel() for part in parts]), scale)


def in_memory_order(dense: Tensor) -> Tensor:
    """Return a view of a dense tensor's elements one behind the other, as they lie in memory.

    Raises:
        ValueError: It has gaps, or an element twice.
    """
    if dense.is_contiguous():
        return flat_view(dense)
    expected = 1
    for stride, size in sorted(zip(dense.stride(), dense.shape, strict=True)):
        if size != 1 and stride != expected:
            raise ValueError(f"a tensor of shape {tuple(dense.shape)} and strides {dense.stride()} is not dense")
        expected *= size
    return dense.as_strided((dense.numel(),), (1,), dense.storage_offset())


def table(parts: Sequence[Tensor], chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """Return what the kernel is told: (address, start, elements, first chunk) of each part, and the part of each chunk."""
    numels = [part.numel() for part in parts]
    first, owners = blocks_of([-(-numel // chunk) for numel in numels])
    starts = [0, *accumulate(numels)][:-1]
    return np.stack([[part.data_ptr() for part in parts], starts, numels, first], axis=1).astype(np.int64), owners


def _checked(name: str, tensors: Sequence[Tensor], flat: Tensor, scale: float) -> list[Tensor]:
    if not flat.is_contiguous() or flat.numel() != sum(t.numel() for t in tensors):
        raise ValueError(
            f"{name} needs a contiguous buffer of {sum(t.numel() for t in tensors)} elements; got shape {tuple(flat.shape)}"
        )
    dtypes = {t.dtype for t in tensors}
    if any(t.device != flat.device for t in tensors) or len(dtypes) > 1:
        raise ValueError(
            f"{name} needs tensors of one dtype on {flat.device}; got {sorted({(str(t.device), str(t.dtype)) for t in tensors})}"
        )
    for dtype in dtypes:
        is_known = dtype in NAMES and flat.dtype in NAMES and compute_dtype(dtype) == compute_dtype(flat.dtype)
        if not is_known and (dtype != flat.dtype or scale != 1):
            raise TypeError(f"{name} neither casts nor scales from {dtype} to {flat.dtype}")
    if any(t.is_conj() or t.is_neg() for t in (*tensors, flat)):
        raise ValueError(f"{name} copies memory as it lies: resolve_conj() and resolve_neg() come first")
    return [in_memory_order(t.detach()) for t in tensors]


def _launched(name: str, parts: Sequence[Tensor], flat: Tensor, scale: float) -> bool:
    if not flat.numel():
        return True
    if not has_kernels(flat):
        return False
    dtype, into = parts[0].dtype, flat.detach()
    if dtype not in NAMES:
        parts, into = [byte_view(part) for part in parts], byte_view(into)
    names = f"{NAMES.get(dtype, 'byte')}_{NAMES.get(flat.dtype, 'byte')}"
    on_device, owners = _remembered(parts, chunk_numel(parts[0].dtype, into.dtype), flat.device)
    args = (on_device.data_ptr(), owners.data_ptr(), into.data_ptr(), scalar(scale, flat.dtype))
    launch("pack.cu", f"{name}_{names}", flat.device, owners.numel(), args)
    return True


def _remembered(parts: Sequence[Tensor], chunk: int, device: torch.device) -> tuple[Tensor, Tensor]:
    # The same tensors come in every step, on the same stream; a table is the stream's that it was copied on.
    key = (device, stream_of(device), chunk, tuple((part.data_ptr(), part.numel()) for part in parts))
    found = _tables.pop(key, None)
    if found is None:
        rows, owners = table(parts, chunk)
        found = (to_device(rows, device), to_device(owners, device))
        while len(_tables) >= _REMEMBERED:
            _tables.popitem(last=False)
    _tables[key] = found
    return found


def _copied(targets: Sequence[Tensor], sources: Sequence[Tensor], scale: float) -> None:
    if not targets:
        return
    if scale != 1:
        wide = compute_dtype(targets[0].dtype)
        sources = [source.to(wide) * scale for source in sources]
    with torch.no_grad():
        torch._foreach_copy_(list(targets), list(sources))
