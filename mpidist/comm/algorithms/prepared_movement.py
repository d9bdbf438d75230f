"""Collectives of ``movement`` prepared for known memory: the same calls of MPI, without the rest.

A function takes the operands of one collective, contiguous host tensors, and returns a function
that executes it on their memory as often as it is called; the tensors need not live on. It returns
None where ``movement`` has more to do than a call of MPI and short copies. Other ranks may execute
the same collective by ``movement``.

Letters: W ranks of the group; N bytes of one contribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import memmove
from functools import partial
from typing import Any, TypeAlias

import torch

from mpidist.comm.algorithms import broadcasts, movement, node_memory
from mpidist.comm.memory import buffer
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.matched_probe import LengthError
from mpidist.comm.mpi.scratch import Scratch

Tensors = Sequence[torch.Tensor]
Run: TypeAlias = Callable[[], object]


def barrier(comm: Communicator, inputs: Tensors, outputs: Tensors) -> Run:
    """Return a function that waits for all ranks."""
    return comm.mpi.Barrier


def broadcast(comm: Communicator, inputs: Tensors, outputs: Tensors, root: int) -> Run | None:
    """Return a broadcast of one tensor.

    The function raises ``LengthError`` where the root's tensor has another length.
    """
    if len(inputs or outputs) != 1 or broadcasts.applies(comm):
        return None
    (tensor,) = inputs or outputs
    nbytes = tensor.nbytes
    word, data, head = movement.head_of(comm)
    address, bcast = tensor.data_ptr(), comm.mpi.Bcast
    bodies: list[buffer.Buffer] = []
    length = nbytes
    if nbytes <= broadcasts.INLINE_BYTES:
        length |= broadcasts.INLINE
    else:
        bodies = [buffer.byte_range(tensor, *piece) for piece in buffer.pieces(nbytes)]

    def send() -> None:
        if not bodies:
            memmove(data, address, nbytes)
        word.value = length
        bcast(head, root)
        for body in bodies:
            bcast(body, root)

    def receive() -> None:
        bcast(head, root)
        if word.value != length:
            sent = movement.broadcast_body(comm, address, nbytes, root)
            if sent != nbytes:
                raise LengthError.of(root, sent, nbytes)
        elif bodies:
            for body in bodies:
                bcast(body, root)
        else:
            memmove(address, data, nbytes)

    return send if comm.rank == root else receive


def all_gather(comm: Communicator, inputs: Tensors, outputs: Tensors) -> Run | None:
    """Return a gather of short tensors into a list of W, which may have different sizes."""
    (source,) = inputs
    counts = [target.nbytes for target in outputs]
    if max(counts) > movement.FLAT_BYTES or not source.nbytes:
        return None
    start, own = outputs[0].data_ptr(), outputs[comm.rank].data_ptr()
    if movement.separated_for(movement.all_gather, comm, inputs, outputs) is not inputs:
        return None
    copies: list[tuple[int, int, int]] = []
    total, are_adjacent = 0, True
    for target, nbytes in zip(outputs, counts, strict=True):
        are_adjacent = are_adjacent and target.data_ptr() == start + total
        copies.append((target.data_ptr(), total, nbytes))
        total += nbytes
    send: Any = buffer.as_bytes(source)
    if are_adjacent:
        send = MPI.IN_PLACE if source.data_ptr() == own else send
        return _gathering(comm, send, start, counts)
    held = comm.scratch(total, torch.uint8, Scratch.PREPARED_GATHERED)
    start = held.data_ptr()
    gather = _gathering(comm, send, start, counts)
    copies = [(target, start + place, nbytes) for target, place, nbytes in copies]

    # The default argument keeps the memory alive: a longer one may replace it in ``scratch``.
    def run(held: torch.Tensor = held) -> None:
        gather()
        for target, place, nbytes in copies:
            memmove(target, place, nbytes)

    return run


def all_gather_into(comm: Communicator, inputs: Tensors, outputs: Tensors) -> Run | None:
    """Return a gather of one tensor of N bytes into one of W·N bytes."""
    if len(inputs) != 1:
        return None
    (source,), (target,) = inputs, outputs
    nbytes = source.nbytes
    if not 0 < nbytes < node_memory.SMALLEST_BYTES or target.nbytes > buffer.MAX_COUNT:
        return None
    is_in_place = source.data_ptr() == target.data_ptr() + comm.rank * nbytes
    if movement.separated_for(movement.all_gather_into, comm, inputs, outputs) is not inputs:
        return None
    send = MPI.IN_PLACE if is_in_place else buffer.as_bytes(source)
    return _gathering(comm, send, target.data_ptr(), [nbytes] * comm.size)


def _gathering(comm: Communicator, send: Any, address: int, counts: list[int]) -> Run:
    memory = buffer.memory(address, sum(counts))
    if min(counts) == max(counts):
        return partial(comm.mpi.Allgather, send, (memory, counts[0], MPI.BYTE))
    return partial(comm.mpi.Allgatherv, send, movement.ragged(memory, counts))
