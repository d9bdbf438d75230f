"""Collectives of Python objects: their checks, and the executors of their frames.

Objects are sent as frames: small ones in one message, large memory (tensors, arrays) directly from
and into place, past 2 GiB in pieces. The calls are collective over the group like their tensor
counterparts, and synchronous.

A frame holds a pickle, which runs code of its sender when it is read, or data: numbers, texts,
containers, tensors and arrays. Every call has an argument ``data_only``: True for data, False for a
pickle, None for the value of ``MPIDIST_TRUST`` (``trust``). A rank that asks for data refuses a
pickle unread (``FrameError``). An object that is not plain data is refused on its own rank
(``NotPlainData``), and the other ranks of a collective raise ``MpidistError``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpidist.comm.execution import arguments
from mpidist.comm.execution.execution import Execution
from mpidist.comm.execution.operation import Operation, Tensors
from mpidist.comm.memory import buffer
from mpidist.comm.memory.buffer_pool import zeroed
from mpidist.comm.messages import object_messages
from mpidist.comm.messages.object_messages import accepted
from mpidist.comm.mpi import trust
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.tags import Tag
from mpidist.comm.serialization import frame
from mpidist.comm.serialization.frame import Message
from mpidist.comm.serialization.tensor_format import Buffer
from mpidist.errors import FrameError

# Header and body of a frame that was received.
Received = tuple[Buffer, Sequence[Buffer]]


def broadcast_object(execution: Execution, obj: object, src: int, data_only: bool | None) -> Any:
    """Return rank ``src``'s object on all ranks."""
    state = execution.state
    where, is_data = state.where("broadcast_object"), trust.is_data_only(data_only)
    arguments.rank(where, src, "src", state.size)
    message, refusal = _encoded(obj, is_data) if state.rank == src else (None, None)
    operation = Operation(
        "broadcast_object", _broadcast, args=(message, src), facts=(("src", src),)
    )
    header, body = execution.launch(operation)
    if refusal is not None:
        raise refusal
    return obj if state.rank == src else accepted(where, header, body, is_data)


def all_gather_object(execution: Execution, obj: object, data_only: bool | None) -> list[Any]:
    """Return the W ranks' objects, in rank order."""
    state = execution.state
    where, is_data = state.where("all_gather_object"), trust.is_data_only(data_only)
    (header, body), refusal = _encoded(obj, is_data)
    data = bytearray().join((header, *body))
    frames = execution.launch(Operation("all_gather_object", _all_gather, args=(data,)))
    if refusal is not None:
        raise refusal
    return [accepted(where, *frame.split(part), is_data) for part in frames]


def gather_object(
    execution: Execution, obj: object, dst: int, data_only: bool | None
) -> list[Any] | None:
    """Return the W ranks' objects on rank ``dst``, None elsewhere."""
    state = execution.state
    where, is_data = state.where("gather_object"), trust.is_data_only(data_only)
    arguments.rank(where, dst, "dst", state.size)
    message, refusal = _encoded(obj, is_data)
    received = execution.launch(
        Operation("gather_object", _gather, args=(message, dst), facts=(("dst", dst),))
    )
    if refusal is not None:
        raise refusal
    if state.rank != dst:
        return None
    return [accepted(where, header, body, is_data) for header, body in received]


def scatter_object(
    execution: Execution, object_list: Sequence[object] | None, src: int, data_only: bool | None
) -> Any:
    """Return the rank's object of rank ``src``'s list of W."""
    state = execution.state
    where, is_data = state.where("scatter_object"), trust.is_data_only(data_only)
    arguments.rank(where, src, "src", state.size)
    messages: list[Message] | None = None
    refusal: Exception | None = None
    if state.rank == src:
        if isinstance(object_list, (list, tuple)) and len(object_list) == state.size:
            encoded = [_encoded(obj, is_data) for obj in object_list]
            refusal = next((error for _, error in encoded if error is not None), None)
            messages = [message for message, _ in encoded]
        else:
            refusal = ValueError(
                f"{where} needs object_list to hold {state.size} objects, one a rank"
            )
        if refusal is not None:  # sent to all ranks, not only to the object's
            messages = [frame.refusal(repr(refusal))] * state.size
    header, body = execution.launch(
        Operation("scatter_object", _scatter, args=(messages, src), facts=(("src", src),))
    )
    if refusal is not None:
        raise refusal
    return accepted(where, header, body, is_data)


def _encoded(obj: object, is_data: bool) -> tuple[Message, Exception | None]:
    """Return an object's message, or the message of a refusal and its error.

    Ranks that wait for the object then get the reason.
    """
    try:
        return frame.encode(obj, is_data), None
    except Exception as error:  # pickle raises any error of the object's own methods
        return frame.refusal(repr(error)), error


def _broadcast(
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


def _all_gather(
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


def _gather(
    comm: Communicator, inputs: Tensors, outputs: Tensors, message: Message, root: int
) -> list[Received]:
    """Return the messages of all ranks on the root, none elsewhere."""
    if comm.rank != root:
        object_messages.send(comm, message, root, Tag.OBJECT_COLLECTIVE)
        return []
    return [
        object_messages.copied(message)
        if peer == root
        else object_messages.receive(comm, peer, Tag.OBJECT_COLLECTIVE)
        for peer in range(comm.size)
    ]


def _scatter(
    comm: Communicator,
    inputs: Tensors,
    outputs: Tensors,
    messages: list[Message] | None,
    root: int,
) -> Received:
    """Return this rank's message."""
    if messages is None:
        return object_messages.receive(comm, root, Tag.OBJECT_COLLECTIVE)
    for peer, message in enumerate(messages):
        if peer != root:
            object_messages.send(comm, message, peer, Tag.OBJECT_COLLECTIVE)
    return object_messages.copied(messages[root])
