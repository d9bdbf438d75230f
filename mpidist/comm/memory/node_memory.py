"""Memory that the other processes of a node can map: anonymous files, by process and descriptor.

A process opens another's file as ``/proc/<process>/fd/<descriptor>``. In another container the same
path may name another file, so each file ends with a random mark, which is compared. The memory is
freed with the last mapping of it, however the processes end; it takes no room of ``/dev/shm``.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import secrets
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from mpidist.comm.mpi import autograd_mode

_MARK_BYTES = 8


class Address(NamedTuple):
    """Place of a file, for other processes of the node.

    Attributes:
        process: The owner's process number.
        file: Its descriptor there.
        mark: The mark behind the last byte.
    """

    process: int
    file: int
    mark: int


class NodeMemory(mmap.mmap):
    """A mapping of one file, zeros at first; a tensor made of it by ``torch.frombuffer`` keeps it.

    Attributes:
        address: The file's place; valid until ``close_file``, or until the owner's mapping is gone.
    """

    address: Address

    def close_file(self) -> None:
        """Close the descriptor: no further process can map the file. A second call does nothing."""
        self._close()

    _close: weakref.finalize


# The own memory of this process, by the address of its first byte.
_own: weakref.WeakValueDictionary[int, NodeMemory] = weakref.WeakValueDictionary()


def created(nbytes: int) -> NodeMemory:
    """Return new memory of this process, zeros.

    Raises:
        OSError: Short of memory or of descriptors.
    """
    mark = secrets.randbits(62)
    file = _anonymous_file(nbytes + _MARK_BYTES)
    try:
        memory = NodeMemory(file, nbytes + _MARK_BYTES)
    except BaseException:
        os.close(file)
        raise
    memory[nbytes:] = mark.to_bytes(_MARK_BYTES, "little")
    memory.address = Address(os.getpid(), file, mark)
    memory._close = weakref.finalize(memory, os.close, file)
    return memory


def mapped(address: Address, nbytes: int) -> NodeMemory | None:
    """Return a mapping of another process's memory; None if this process cannot reach it."""
    path = f"/proc/{address.process}/fd/{address.file}"
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        memory = NodeMemory(file, nbytes + _MARK_BYTES)
    except (OSError, ValueError):  # ValueError: a file of another size
        return None
    finally:
        os.close(file)
    found = memory[nbytes:]
    return memory if found == address.mark.to_bytes(_MARK_BYTES, "little") else None


def allocated(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros in new memory, which ``found`` then finds.

    Raises:
        OSError: Short of memory or of descriptors.
    """
    numel = math.prod(shape)
    with autograd_mode.allocating():
        if not numel:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        memory = created(numel * dtype.itemsize)
        tensor = torch.frombuffer(memory, dtype=dtype, count=numel).view(tuple(shape))
    _own[tensor.data_ptr()] = memory
    return tensor


def found(tensor: torch.Tensor) -> tuple[NodeMemory, int] | None:
    """Return the memory of ``allocated`` that a tensor lies in, and its offset there in bytes.

    None for a tensor of other memory, or without elements.
    """
    if not tensor.numel():
        return None
    start = tensor.untyped_storage().data_ptr()
    memory = _own.get(start) if start else None
    return None if memory is None else (memory, tensor.data_ptr() - start)


def nbytes_of(memory: NodeMemory) -> int:
    """Return the bytes in front of the mark."""
    return len(memory) - _MARK_BYTES


def _anonymous_file(nbytes: int) -> int:
    file = os.memfd_create("mpidist", os.MFD_CLOEXEC)
    try:
        # Allocated now: if memory is short, this is an error here and not a signal at first access.
        os.posix_fallocate(file, 0, nbytes)
    except OSError:
        with contextlib.suppress(OSError):
            os.close(file)
        raise
    return file
