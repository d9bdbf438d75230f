"""MPI buffers of tensors: address, count and datatype; counts past a C int.

MPI works on the memory of a contiguous CPU tensor. A strided or expanded tensor is executed on a
host copy (``host_copies``), and outputs are written back. For CUDA tensors ``device_collectives``
decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch

from mpidist.comm.mpi import autograd_mode
from mpidist.comm.mpi.library import MPI

# MPI's classic interface counts in a C int. Half of its range, so that a sum of two counts fits
# too.
MAX_COUNT = 1 << 30

# Memory, count and datatype; as text, because a name of MPI starts MPI.
Buffer: TypeAlias = "tuple[Any, int, MPI.Datatype]"


def pieces(count: int, limit: int | None = None) -> Iterator[tuple[int, int]]:
    """Split ``count`` items into runs that MPI can count.

    Args:
        count: Items, ≥ 0; may be past 2³¹.
        limit: Longest run; ``MAX_COUNT`` if None.

    Yields:
        (start, length) of each run; one empty run for ``count`` 0, so that every rank enters MPI
        the same number of times.
    """
    limit = MAX_COUNT if limit is None else limit
    if count <= limit:
        yield 0, count
        return
    for start in range(0, count, limit):
        yield start, min(limit, count - start)


def memory(address: int, nbytes: int) -> Any:
    """Return ``nbytes`` of memory at ``address`` as an MPI buffer, which does not keep it alive."""
    return MPI.buffer.fromaddress(address, nbytes)


def as_bytes(tensor: torch.Tensor) -> Buffer:
    """Return the buffer of a contiguous host tensor of at most ``MAX_COUNT`` bytes."""
    nbytes = tensor.nbytes
    return (MPI.buffer.fromaddress(tensor.data_ptr(), nbytes), nbytes, MPI.BYTE)


def byte_range(tensor: torch.Tensor, start: int, nbytes: int) -> Buffer:
    """Return the buffer of ``nbytes`` of a contiguous host tensor from byte ``start`` on."""
    return (MPI.buffer.fromaddress(tensor.data_ptr() + start, nbytes), nbytes, MPI.BYTE)


def elements(tensor: torch.Tensor, start: int, count: int, datatype: MPI.Datatype) -> Buffer:
    """Return the buffer of ``count`` elements of a contiguous host tensor from ``start`` on."""
    size = tensor.element_size()
    return (MPI.buffer.fromaddress(tensor.data_ptr() + start * size, count * size), count, datatype)


def is_direct(*tensors: torch.Tensor) -> bool:
    """Return whether MPI can work on the tensors' own memory: contiguous, on the CPU."""
    for tensor in tensors:
        # ``is_plain`` in this frame, as a call costs as much as its looks.
        if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return False
    return True


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is contiguous, with no pending conjugation or negation."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def overwrite(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy ``values`` into a tensor; an element that an expanded tensor repeats is written once."""
    target, source = tensor.detach(), values
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and size > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    with autograd_mode.writing((target,)):
        target.copy_(source, non_blocking=True)
