"""Sends and receives of a collective: contiguous host tensors, from and to their own memory.

Each receive is matched before any byte is received, so another length is an error and not an
overwritten tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpidist.comm.memory import buffer
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.matched_probe import Receives
from mpidist.comm.mpi.tags import Tag
from mpidist.kernels.view import byte_view

Tensors = Sequence[torch.Tensor]


def pairwise_exchange(comm: Communicator, inputs: Tensors, outputs: Tensors) -> None:
    """Send the i-th tensor to rank i and receive the i-th tensor from rank i, in W - 1 rounds.

    In each round every rank sends to one rank and receives from one.

    Collective: over the group.

    Raises:
        LengthError: A rank sent another number of bytes than this one expected; after the last
            round.
    """
    rank, size = comm.rank, comm.size
    copy_own(outputs[rank], inputs[rank])
    tag, receives = comm.own_tag(Tag.MOVEMENT), Receives(comm)
    for distance in range(1, size):
        dest, source = (rank + distance) % size, (rank - distance) % size
        requests = _send(comm, inputs[dest], dest, tag)
        _receive(receives, outputs[source], source, tag)
        comm.wait_all(requests)
    receives.end()


def sendrecv(
    comm: Communicator,
    sends: list[tuple[int, torch.Tensor]],
    receives: list[tuple[int, torch.Tensor]],
) -> None:
    """Send and receive tensors, pairs of (peer, tensor), all at once.

    Raises:
        LengthError: A peer sent another number of bytes than this rank expected; after the last
            message.
    """
    tag, matched = comm.own_tag(Tag.MOVEMENT), Receives(comm)
    requests = [request for peer, tensor in sends for request in _send(comm, tensor, peer, tag)]
    for peer, tensor in receives:
        _receive(matched, tensor, peer, tag)
    comm.wait_all(requests)
    matched.end()


def copy_own(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a rank's contribution to itself, unless both are the same memory."""
    if target.data_ptr() != source.data_ptr():
        byte_view(target).copy_(byte_view(source))


def _receive(receives: Receives, tensor: torch.Tensor, source: int, tag: int) -> None:
    for start, length in buffer.pieces(tensor.nbytes):
        receives.receive(buffer.byte_range(tensor, start, length), source, tag)


def _send(comm: Communicator, tensor: torch.Tensor, dest: int, tag: int) -> list[MPI.Request]:
    return [
        comm.mpi.Isend(buffer.byte_range(tensor, start, length), dest, tag)
        for start, length in buffer.pieces(tensor.nbytes)
    ]
