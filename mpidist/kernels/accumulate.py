"""``y += a * x`` with fp32 accumulation: the step of a reduction whose types are narrow.

``cuda/accumulate.cu`` does it on the device; the torch twin in this file gives the same numbers on the CPU.
"""

from __future__ import annotations

import torch

from mpidist.kernels import load

_THREADS = 256
_MAX_BLOCKS = 4096
_NAMES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat16", torch.float64: "double"}


def accumulate(y: torch.Tensor, x: torch.Tensor, a: float = 1.0) -> torch.Tensor:
    """Add ``a * x`` to ``y`` in place.

    The product and the sum are taken in fp32 (fp64 for fp64) and rounded once to ``y``'s dtype.

    Blocks: not; on CUDA the work is queued on the current stream.

    Args:
        y: Contiguous tensor of N elements; float16, bfloat16, float32 or float64.
        x: Contiguous tensor of N elements of the same dtype, on the same device.
        a: Factor.

    Returns:
        ``y``.

    Raises:
        ValueError: Sizes or devices differ, or a tensor is not contiguous.
        TypeError: Dtypes differ or have no kernel.
    """
    if y.numel() != x.numel() or y.device != x.device or not (y.is_contiguous() and x.is_contiguous()):
        raise ValueError(
            f"accumulate needs contiguous tensors of one size and device; got {tuple(y.shape)} on {y.device} and "
            f"{tuple(x.shape)} on {x.device}"
        )
    if y.dtype is not x.dtype or y.dtype not in _NAMES:
        raise TypeError(f"accumulate needs one of {sorted(map(str, _NAMES))} for both tensors; got {y.dtype} and {x.dtype}")
    if y.numel() and y.is_cuda and load.is_available():
        _launch(y, x, a)
        return y
    return twin(y, x, a)


def twin(y: torch.Tensor, x: torch.Tensor, a: float = 1.0) -> torch.Tensor:
    """Do the same with torch's own operations."""
    if y.dtype in (torch.float16, torch.bfloat16):
        return y.copy_(torch.add(y.float(), x.float() * a).view(y.shape))
    return y.add_((x * a).view(y.shape))


def _launch(y: torch.Tensor, x: torch.Tensor, a: float) -> None:
    import cupy

    kernel = load.function("accumulate.cu", f"accumulate_{_NAMES[y.dtype]}", y.device.index)
    numel = y.numel()
    blocks = min(-(-numel // _THREADS), _MAX_BLOCKS)
    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream(y.device).cuda_stream, y.device.index)
    factor = cupy.float64(a) if y.dtype is torch.float64 else cupy.float32(a)
    with cupy.cuda.Device(y.device.index), stream:
        kernel((blocks,), (_THREADS,), (y.data_ptr(), x.data_ptr(), cupy.int64(numel), factor))
