"""Kernel launches on torch's current stream, with tables in device memory.

Letters: N elements of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from mpidist.kernels import load

# An argument of a kernel: a pointer, or a scalar of the kernel's type.
Argument = int | np.generic

THREADS = 256
# One block's share of an element-wise kernel, of the wider type; as in cuda/common.cuh.
CHUNK_BYTES = 16 << 10

# Names of torch's dtypes in the kernels.
NAMES = {
    torch.float32: "float",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float64: "double",
}


def has_kernels(tensor: torch.Tensor) -> bool:
    """Return whether a kernel can be used for the tensor; else its torch twin is."""
    return tensor.is_cuda and load.is_available(tensor.device.index)


def chunk_numel(*dtypes: torch.dtype) -> int:
    """Return the number of elements that one block of an element-wise kernel processes."""
    return CHUNK_BYTES // max(dtype.itemsize for dtype in dtypes)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a kernel computes."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def blocks_of(shares: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Assign consecutive blocks to items.

    Args:
        shares: Number of blocks of each item.

    Returns:
        The first block of each item (int64), and the item of each block (int32).
    """
    counts = np.asarray(shares, np.int64)
    return np.cumsum(counts) - counts, np.repeat(np.arange(len(counts), dtype=np.int32), counts)


def to_device(table: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy a host table to the device on the current stream; the host does not wait."""
    held = torch.from_numpy(table)
    return held.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else held


def launch(
    file: str,
    name: str,
    device: torch.device,
    blocks: int,
    args: Sequence[Argument],
    threads: int = THREADS,
    defines: Sequence[str] = (),
) -> None:
    """Queue a kernel on the device's current stream.

    Args:
        args: Pointers as ints, other arguments as NumPy scalars of the kernel's types.

    Raises:
        KernelError: The source does not compile.
    """
    kernel = load.function(file, name, device.index, tuple(defines))
    queued = partial(kernel, (blocks,), (threads,), tuple(args), stream=_Stream(stream_of(device)))
    # Changing the current device takes as long as a launch, and is seldom necessary.
    if torch.cuda.current_device() == device.index:
        queued()
    else:
        with load.current_device(device.index):
            queued()


class _Stream:
    """A stream's handle under the attribute that CuPy reads.

    With ``CUPY_CUDA_PER_THREAD_DEFAULT_STREAM`` set, CuPy's own stream class and torch take handle
    0 for different streams.
    """

    __slots__ = ("ptr",)

    def __init__(self, handle: int) -> None:
        self.ptr = handle


def stream_of(device: torch.device) -> int:
    """Return the handle of the device's current stream; 0 on the host."""
    # Every launch calls this, and ``torch.cuda.current_stream`` takes ten times as long.
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def scalar(value: float, dtype: torch.dtype) -> np.float32 | np.float64:
    """Return a factor in the type of kernels that work on ``dtype``."""
    return np.float64(value) if dtype is torch.float64 else np.float32(value)
