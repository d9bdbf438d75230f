"""Collectives that move data without arithmetic, over contiguous host tensors.

Every function takes ``(comm, inputs, outputs, …)`` and must be called by all W ranks of the group
in one order. Contributions are sent as bytes, so every dtype works. Past ``MAX_COUNT`` bytes a
collective becomes a series of smaller transfers (MPI-4.1 §2.5.8: the classic interface counts in a
C int).

Letters: W ranks of the group; N bytes of one contribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from ctypes import c_uint64, memmove
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from mpidist.comm.algorithms import broadcasts, fingerprint, node_memory
from mpidist.comm.algorithms.broadcasts import HEAD_BYTES, INLINE, INLINE_BYTES, LENGTH_BYTES
from mpidist.comm.algorithms.sendrecv import copy_own, pairwise_exchange, sendrecv
from mpidist.comm.memory import buffer
from mpidist.comm.memory.overlap import Places, separated
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.matched_probe import LengthError
from mpidist.comm.mpi.scratch import Scratch
from mpidist.kernels.view import byte_view

Tensors = Sequence[torch.Tensor]

# Lists of tensors up to this size each are sent through one flat buffer and one MPI collective.
# Larger tensors are sent from and to their own memory by messages, because the copy would cost more
# than W - 1 messages.
FLAT_BYTES = 32 << 10


def barrier(comm: Communicator, inputs: Tensors, outputs: Tensors) -> None:
    """Wait for all ranks (MPI-4.1 §6.3)."""
    comm.mpi.Barrier()


def broadcast(comm: Communicator, inputs: Tensors, outputs: Tensors, root: int) -> None:
    """Broadcast the root's tensors: ``inputs`` at the root, ``outputs`` on the other ranks.

    Raises:
        LengthError: On ranks whose tensors have another length than the root's.
    """
    if broadcasts.applies(comm):
        broadcasts.execute(comm, inputs or outputs, root)
        return
    error: LengthError | None = None
    for tensor in inputs or outputs:
        nbytes = tensor.nbytes
        sent = _broadcast_one(comm, tensor, nbytes, root)
        if sent != nbytes and error is None:
            error = LengthError.of(root, sent, nbytes)
    if error is not None:
        raise error


def _broadcast_one(comm: Communicator, tensor: torch.Tensor, nbytes: int, root: int) -> int:
    """Broadcast a tensor, unless its length differs; return the root's length."""
    # MPI would write a longer message past the end of a shorter tensor before it reports the error.
    word, data, head = head_of(comm)
    if comm.rank == root:
        # The host cannot read device memory.
        is_inline = nbytes <= INLINE_BYTES and tensor.is_cpu
        if is_inline:
            memmove(data, tensor.data_ptr(), nbytes)
        word.value = nbytes | INLINE if is_inline else nbytes
    comm.mpi.Bcast(head, root)
    is_inline, sent = word.value >= INLINE, word.value & ~INLINE
    if not is_inline or sent != nbytes:
        return broadcast_body(comm, tensor.data_ptr(), nbytes, root)
    if comm.rank != root:
        if tensor.is_cpu:
            memmove(tensor.data_ptr(), data, nbytes)
        else:
            memory = comm.scratch(HEAD_BYTES, torch.uint8, Scratch.HEADER)
            byte_view(tensor).copy_(memory[LENGTH_BYTES : LENGTH_BYTES + nbytes])
    return sent


def broadcast_body(comm: Communicator, address: int, nbytes: int, root: int) -> int:
    """Broadcast the data behind a first message without them; return the root's length.

    Data of another length than this rank's are received in memory of their own.
    """
    word, _, _ = head_of(comm)
    is_inline, sent = word.value >= INLINE, word.value & ~INLINE
    if not is_inline:
        other = None if sent == nbytes else torch.empty(sent, dtype=torch.uint8, device="cpu")
        begin = address if other is None else other.data_ptr()
        for start, length in buffer.pieces(sent):
            comm.mpi.Bcast((buffer.memory(begin + start, length), length, MPI.BYTE), root)
    return sent


def head_of(comm: Communicator) -> tuple[c_uint64, int, buffer.Buffer]:
    """Return a broadcast's first message: length word, address of the data, MPI buffer."""
    held: tuple[c_uint64, int, buffer.Buffer] | None = comm.kept.get("head")
    if held is None:
        address = comm.scratch(HEAD_BYTES, torch.uint8, Scratch.HEADER).data_ptr()
        message = (buffer.memory(address, HEAD_BYTES), HEAD_BYTES, MPI.BYTE)
        held = comm.kept["head"] = (
            c_uint64.from_address(address),
            address + LENGTH_BYTES,
            message,
        )
    return held


def all_gather_into(comm: Communicator, inputs: Tensors, outputs: Tensors) -> None:
    """Gather each rank's tensor into a flat one: pairs of (N bytes) and (W·N bytes)."""
    inputs = separated_for(all_gather_into, comm, inputs, outputs)
    memory = node_memory.of(comm)
    for source, target in zip(inputs, outputs, strict=True):
        nbytes = source.nbytes
        if (
            memory is not None
            and memory.is_shared
            and nbytes >= node_memory.SMALLEST_BYTES
            and memory.all_gather(comm, source, target)
        ):
            continue
        if nbytes * comm.size <= buffer.MAX_COUNT:
            mine = target.data_ptr() + comm.rank * nbytes
            send = MPI.IN_PLACE if source.data_ptr() == mine and nbytes else buffer.as_bytes(source)
            comm.mpi.Allgather(
                send, (buffer.memory(target.data_ptr(), target.nbytes), nbytes, MPI.BYTE)
            )
        else:
            pairwise_exchange(
                comm,
                [source] * comm.size,
                list(target.view(comm.size, *_flat_shape(target, comm.size))),
            )


def all_gather(comm: Communicator, inputs: Tensors, outputs: Tensors) -> None:
    """Gather each rank's tensor into a list of W tensors, which may have different sizes."""
    (source,) = separated_for(all_gather, comm, inputs, outputs)
    counts = [t.nbytes for t in outputs]
    # The choice depends on sizes only, which all ranks know; memory addresses differ between ranks.
    if max(counts) > FLAT_BYTES:
        pairwise_exchange(comm, [source] * comm.size, outputs)
        return
    flat = _as_one(outputs, counts[0])
    held = flat if flat is not None else comm.scratch(sum(counts), torch.uint8)
    is_in_place = source.nbytes and source.data_ptr() == held.data_ptr() + sum(counts[: comm.rank])
    # MPI forbids other overlap than IN_PLACE.
    send = MPI.IN_PLACE if is_in_place else buffer.as_bytes(source)
    if min(counts) == max(counts):
        comm.mpi.Allgather(send, (buffer.memory(held.data_ptr(), sum(counts)), counts[0], MPI.BYTE))
    else:
        comm.mpi.Allgatherv(send, ragged(_memory(held), counts))
    if flat is None:
        _unpack(held, outputs, counts)


def gather(comm: Communicator, inputs: Tensors, outputs: Tensors, root: int) -> None:
    """Gather each rank's tensor at the root; ``outputs`` is empty on other ranks."""
    (source,) = separated_for(gather, comm, inputs, outputs)
    if source.nbytes <= FLAT_BYTES:
        if comm.rank != root:
            comm.mpi.Gather(buffer.as_bytes(source), None, root)
            return
        held = comm.scratch(source.nbytes * comm.size, torch.uint8)
        comm.mpi.Gather(
            buffer.as_bytes(source),
            (buffer.memory(held.data_ptr(), held.nbytes), source.nbytes, MPI.BYTE),
            root,
        )
        _unpack(held, outputs, [source.nbytes] * comm.size)
    elif comm.rank == root:
        copy_own(outputs[root], source)
        sendrecv(comm, [], [(peer, outputs[peer]) for peer in range(comm.size) if peer != root])
    else:
        sendrecv(comm, [(root, source)], [])


def scatter(comm: Communicator, inputs: Tensors, outputs: Tensors, root: int) -> None:
    """Send the root's i-th tensor to rank i; ``inputs`` is empty on other ranks."""
    (target,) = outputs
    inputs = separated_for(scatter, comm, inputs, outputs)
    if target.nbytes <= FLAT_BYTES:
        if comm.rank != root:
            comm.mpi.Scatter(None, buffer.as_bytes(target), root)
            return
        held = comm.scratch(target.nbytes * comm.size, torch.uint8)
        _pack(held, inputs, [target.nbytes] * comm.size)
        comm.mpi.Scatter(
            (buffer.memory(held.data_ptr(), held.nbytes), target.nbytes, MPI.BYTE),
            buffer.as_bytes(target),
            root,
        )
    elif comm.rank == root:
        copy_own(target, inputs[root])
        sendrecv(comm, [(peer, inputs[peer]) for peer in range(comm.size) if peer != root], [])
    else:
        sendrecv(comm, [], [(root, target)])


def all_to_all(comm: Communicator, inputs: Tensors, outputs: Tensors) -> None:
    """Send the i-th of W tensors to rank i and receive the i-th from rank i; sizes may differ."""
    pairwise_exchange(comm, separated_for(all_to_all, comm, inputs, outputs), outputs)


def all_to_all_single(
    comm: Communicator,
    inputs: Tensors,
    outputs: Tensors,
    send_bytes: Sequence[int],
    recv_bytes: Sequence[int],
) -> None:
    """Exchange slices of one tensor: ``send_bytes[i]`` to rank i, ``recv_bytes[i]`` from it.

    Raises:
        ValueError: More bytes than MPI can count, and the slices have no common unit.
    """
    (source,), (target,) = separated(inputs, outputs), outputs
    if max(source.nbytes, target.nbytes) <= buffer.MAX_COUNT:
        comm.mpi.Alltoallv(ragged(_memory(source), send_bytes), ragged(_memory(target), recv_bytes))
        return
    # A rank with more bytes than it can count counts in larger units. The other ranks may count in
    # bytes, because MPI matches bytes.
    unit = math.gcd(*send_bytes, *recv_bytes)
    if max(source.nbytes, target.nbytes) // unit > buffer.MAX_COUNT:
        raise ValueError(
            f"all_to_all_single cannot count {max(source.nbytes, target.nbytes)} bytes in units of "
            f"{unit}"
        )
    datatype = MPI.BYTE.Create_contiguous(unit).Commit()
    try:
        comm.mpi.Alltoallv(
            ragged(_memory(source), send_bytes, unit, datatype),
            ragged(_memory(target), recv_bytes, unit, datatype),
        )
    finally:
        datatype.Free()


def separated_for(
    execute: Callable[..., None], comm: Communicator, inputs: Tensors, outputs: Tensors
) -> Tensors:
    """Return the inputs, copies of those that ``execute`` would overwrite; the same if of none."""
    return separated(inputs, outputs, partial(in_place, execute, comm.rank, inputs, outputs))


def in_place(execute: Callable[..., None], rank: int, inputs: Tensors, outputs: Tensors) -> Places:
    """Return the addresses at which ``execute`` allows an input inside an output (in place)."""
    if execute is all_gather_into:
        pairs = enumerate(zip(inputs, outputs, strict=True))
        return {
            (place, place): target.data_ptr() + rank * source.nbytes
            for place, (source, target) in pairs
        }
    if execute in (all_gather, gather) and outputs:
        return {(0, rank): outputs[rank].data_ptr()}
    if execute is scatter:
        return {(rank, 0): outputs[0].data_ptr()}
    return {(rank, rank): outputs[rank].data_ptr()} if execute is all_to_all else {}


def _as_one(tensors: Tensors, nbytes: int) -> torch.Tensor | None:
    # Tensors of one size that are adjacent in memory (chunks of one tensor) are received as one.
    start = tensors[0].data_ptr()
    for place, tensor in enumerate(tensors):
        if tensor.nbytes != nbytes or tensor.data_ptr() != start + place * nbytes:
            return None
    first = tensors[0].detach()
    try:
        return first.as_strided((first.numel() * len(tensors),), (1,), first.storage_offset())
    except RuntimeError:  # adjacent, but of different storages
        return None


def ragged(
    memory: Any, nbytes: Sequence[int], unit: int = 1, datatype: MPI.Datatype | None = None
) -> tuple[Any, tuple[list[int], list[int]], MPI.Datatype]:
    """Return the buffer of consecutive slices of some memory, counted in units."""
    counts = [n // unit for n in nbytes] if unit > 1 else list(nbytes)
    starts = [0, *accumulate(counts)][:-1]
    return (memory, (counts, starts), datatype or MPI.BYTE)


def _memory(tensor: torch.Tensor) -> Any:
    return buffer.memory(tensor.data_ptr(), tensor.nbytes)


def _flat_shape(tensor: torch.Tensor, parts: int) -> tuple[int, ...]:
    return (tensor.numel() // parts,)


def _pack(held: torch.Tensor, tensors: Tensors, counts: Sequence[int]) -> None:
    # memmove by address: for short tensors, views for torch's copy_ cost several times the copy.
    address = held.data_ptr()
    for tensor, nbytes in zip(tensors, counts, strict=True):
        memmove(address, tensor.data_ptr(), nbytes)
        address += nbytes


def _unpack(held: torch.Tensor, tensors: Tensors, counts: Sequence[int]) -> None:
    address = held.data_ptr()
    for tensor, nbytes in zip(tensors, counts, strict=True):
        memmove(tensor.data_ptr(), address, nbytes)
        address += nbytes


def compared(
    execute: Callable[..., None], where: str, sends: Sequence[int], receives: Sequence[int]
) -> Callable[..., None]:
    """Return an all-to-all that first compares the counts of all ranks (debug mode)."""

    def run(comm: Communicator, *args: object) -> None:
        fingerprint.check_matrix(
            comm, where, sends, receives, "elements" if execute is all_to_all else "rows"
        )
        execute(comm, *args)

    return run
