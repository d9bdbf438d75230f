"""Executors of object collectives: frames between the ranks of a group.

Letters: W ranks of the group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpidist.comm.execution.operation import Tensors
from mpidist.comm.memory import buffer
from mpidist.comm.memory.buffer_pool import zeroed
from mpidist.comm.messages import object_messages
from mpidist.comm.messages.object_messages import ObjectReceiver
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.tags import Tag
from mpidist.comm.serialization import frame
from mpidist.comm.serialization.frame import Message
from mpidist.comm.serialization.tensor_format import Buffer
from mpidist.errors import FrameError

# Header and body of a frame that was received.
Received = tuple[Buffer, Sequence[Buffer]]


def broadcast(
    comm: Communicator, inputs: Tensors, outputs: Tensors, message: Message | None, root: int
) -> Received:
    """Return the root's message."""
    header: Buffer
    if message is not None:
        header, body = message
        comm.mpi.Bcast((len(header).to_bytes(8, "little"), 8, MPI.BYTE), root)
        comm.mpi.Bcast((header, len(header), MPI.BYTE), root)
    else:
        length = bytearray(8)
        comm.mpi.Bcast((length, 8, MPI.BYTE), root)
        header = zeroed(int.from_bytes(length, "little"))
        comm.mpi.Bcast((header, len(header), MPI.BYTE), root)
        body = [zeroed(n) for n in frame.body_lengths(header)]
    for part in body:
        for start, count in buffer.pieces(part.nbytes):
            comm.mpi.Bcast((part[start : start + count], count, MPI.BYTE), root)
    return header, body


def all_gather(
    comm: Communicator, inputs: Tensors, outputs: Tensors, data: bytearray
) -> list[memoryview]:
    """Return the frames of all ranks."""
    mine = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
    lengths = torch.empty(comm.size, dtype=torch.int64, device="cpu")
    comm.mpi.Allgather(
        buffer.as_bytes(mine), (buffer.memory(lengths.data_ptr(), lengths.nbytes), 8, MPI.BYTE)
    )
    counts = lengths.tolist()
    if min(counts) < 0:
        raise FrameError(
            f"rank {counts.index(min(counts))} announces an object of {min(counts)} bytes"
        )
    if max(counts) <= object_messages.SMALL_BYTES:
        space = bytearray(sum(counts))
        starts = [sum(counts[:i]) for i in range(comm.size)]
        comm.mpi.Allgatherv((data, len(data), MPI.BYTE), (space, (counts, starts), MPI.BYTE))
        view = memoryview(space)
        return [view[start : start + count] for start, count in zip(starts, counts, strict=True)]
    frames = []
    for root, count in enumerate(counts):
        part = memoryview(data) if root == comm.rank else zeroed(count)
        for start, length in buffer.pieces(count):
            comm.mpi.Bcast((part[start : start + length], length, MPI.BYTE), root)
        frames.append(part)
    return frames


def gather(
    comm: Communicator, inputs: Tensors, outputs: Tensors, message: Message, root: int
) -> list[Received]:
    """Return the messages of all ranks on the root, none elsewhere."""
    if comm.rank != root:
        object_messages.send(comm, message, root, Tag.OBJECT_COLLECTIVE)
        return []
    receiver = ObjectReceiver()
    return [
        object_messages.copied(message)
        if peer == root
        else receiver.receive(comm, peer, Tag.OBJECT_COLLECTIVE)[:2]
        for peer in range(comm.size)
    ]


def scatter(
    comm: Communicator,
    inputs: Tensors,
    outputs: Tensors,
    messages: list[Message] | None,
    root: int,
) -> Received:
    """Return this rank's message."""
    if messages is None:
        return ObjectReceiver().receive(comm, root, Tag.OBJECT_COLLECTIVE)[:2]
    for peer, message in enumerate(messages):
        if peer != root:
            object_messages.send(comm, message, peer, Tag.OBJECT_COLLECTIVE)
    return object_messages.copied(messages[root])
