"""Messages of plain host memory, sent and received without the objects of the general path.

A tensor that MPI can read or write in place, a valid rank and a valid tag need neither checks nor
copies. A thread that waits for its only message probes for it by itself for a short time; it
enters the group's queue of posted receives, with its watchdog, timeout and checks of the peer, only
when the message is late. Everything else takes the general path of ``p2p``.

Source: MPI-4.1 §3.8.2 (matched probe): the length is compared before bytes are received.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from mpidist.comm.memory import buffer
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import MatchedMessage, Mpi, Request

# A message within a node arrives within this time, or its sender is late.
_SPIN_S = 200e-6
_PROBES = 32  # between two looks at the clock, each with a yield to the sender on this core
_STRIDED = torch.strided


class DirectMessages:
    """The direct messages of one group.

    Args:
        mpi: The group's communicator.
        comm: Its size and highest tag.
        is_open: False if the values of each message are looked at before it is sent.
    """

    __slots__ = ("_byte", "_highest_tag", "_isend", "_longest", "_memory", "_probe", "_size")

    def __init__(self, mpi: Mpi, comm: Communicator, is_open: bool) -> None:
        self._size, self._highest_tag = comm.size, comm.max_tag
        self._longest = buffer.MAX_COUNT if is_open else -1  # in bytes; -1: no message is direct
        # Looked up once, because each attribute access costs 30 ns.
        self._isend, self._probe = mpi.Isend, mpi.Improbe
        self._byte, self._memory = MPI.BYTE, MPI.buffer.fromaddress

    def take(self, tensor: torch.Tensor, peer: int, tag: int) -> bool:
        """Return whether a message needs no check, no copy and one call of MPI."""
        return (
            type(tensor) is torch.Tensor
            and type(peer) is int
            and 0 <= peer < self._size
            and type(tag) is int
            and 0 <= tag <= self._highest_tag
            and tensor.is_cpu
            and tensor.layout is _STRIDED
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and not tensor.is_conj()
            and tensor.nbytes <= self._longest
        )

    def start_send(self, tensor: torch.Tensor, dst: int, tag: int) -> Request:
        """Start the send of a tensor that ``take`` accepts."""
        nbytes = tensor.nbytes
        return self._isend((self._memory(tensor.data_ptr(), nbytes), nbytes, self._byte), dst, tag)

    def match(self, src: int, tag: int, status: MPI.Status) -> MPI.Message | MatchedMessage | None:
        """Match a message that arrives soon; None if it is late.

        Args:
            src: The sender's rank, or ``MPI.ANY_SOURCE``.
            tag: The message's tag.
            status: Filled with sender and length.
        """
        probe = self._probe
        for _ in range(_PROBES):
            message = probe(src, tag, status)
            if message is not None:
                return message
        end_s = time.monotonic() + _SPIN_S
        while time.monotonic() < end_s:
            os.sched_yield()
            for _ in range(_PROBES):
                message = probe(src, tag, status)
                if message is not None:
                    return message
        return None

    def start_receive(
        self, tensor: torch.Tensor, nbytes: int, message: MPI.Message | MatchedMessage
    ) -> Request:
        """Start the receive of a matched message of the tensor's length."""
        return message.Irecv((self._memory(tensor.data_ptr(), nbytes), nbytes, self._byte))


def ends_soon(request: Any) -> bool:
    """Test a request for a short time; say whether it has ended.

    Raises:
        MPI.Exception: The message has failed.
    """
    test = request.Test
    for _ in range(_PROBES):
        if test():
            return True
    end_s = time.monotonic() + _SPIN_S
    while time.monotonic() < end_s:
        os.sched_yield()
        for _ in range(_PROBES):
            if test():
                return True
    return False
