"""Launches of kernels: on torch's current stream, from tables that lie on the device.

Letters: N elements of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from mpidist.kernels import load

THREADS = 256
# one block's share of an element-wise kernel, of the wider type; as in cuda/common.cuh
CHUNK_BYTES = 16 << 10

# The kernels' names of torch's dtypes.
NAMES = {
    torch.float32: "float",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float64: "double",
}


def has_kernels(tensor: torch.Tensor) -> bool:
    """Say whether a kernel can work on the tensor; else its torch twin does."""
    return tensor.is_cuda and load.is_available(tensor.device.index)


def chunk_numel(*dtypes: torch.dtype) -> int:
    """Return how many elements one block of an element-wise kernel takes."""
    return CHUNK_BYTES // max(dtype.itemsize for dtype in dtypes)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a kernel computes."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def blocks_of(shares: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Give items their blocks, one behind the other.

    Args:
        shares: How many blocks each item takes.

    Returns:
        The first block of each item (int64), and the item of each block (int32).
    """
    counts = np.asarray(shares, np.int64)
    return np.cumsum(counts) - counts, np.repeat(np.arange(len(counts), dtype=np.int32), counts)


def to_device(table: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy a host table to the device, in the order of the current stream; the host does not wait."""
    held = torch.from_numpy(table)
    return held.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else held


def launch(
    file: str,
    name: str,
    device: torch.device,
    blocks: int,
    args: Sequence[Any],
    threads: int = THREADS,
    defines: Sequence[str] = (),
) -> None:
    """Queue a kernel on the device's current stream.

    Args:
        args: Pointers as ints, other arguments as NumPy scalars of the kernel's types.

    Raises:
        KernelError: The text does not compile.
    """
    kernel = load.function(file, name, device.index, tuple(defines))
    queued = partial(kernel, (blocks,), (threads,), tuple(args), stream=_Stream(stream_of(device)))
    # To change devices takes as long as a launch, and seldom has to be.
    if torch.cuda.current_device() == device.index:
        queued()
    else:
        with load.current_device(device.index):
            queued()


class _Stream:
    """A stream's handle under the name that CuPy asks for.

    A stream of CuPy's own takes handle 0 for another stream than torch does where
    ``CUPY_CUDA_PER_THREAD_DEFAULT_STREAM`` is set.
    """

    __slots__ = ("ptr",)

    def __init__(self, handle: int) -> None:
        self.ptr = handle


def stream_of(device: torch.device) -> int:
    """Return the handle of the device's current stream; 0 on the host."""
    # ``torch.cuda.current_stream`` takes ten times as long, and every launch asks.
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def scalar(value: float, dtype: torch.dtype) -> Any:
    """Return a factor as a kernel that works on ``dtype`` takes it."""
    return np.float64(value) if dtype is torch.float64 else np.float32(value)
