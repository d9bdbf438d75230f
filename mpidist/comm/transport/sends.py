"""Sends under way: eager messages with their payloads, and the completion of all sends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat

import torch

from mpidist.comm.memory.device_request import start_request
from mpidist.comm.memory.stream import Device
from mpidist.comm.messages import device_p2p
from mpidist.comm.mpi import agreement_lock, mpi_errors
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import Request
from mpidist.comm.serialization.tensor_format import Part
from mpidist.comm.transport.payload_receives import pieces_of

# Sends under way from which on a thread that sends tests them as well.
MAX_PENDING = 64


class Sends:
    """Sends of one communicator.

    Args:
        isend: See the attribute.
        eager_tag: Of eager messages.
        payload_tag: Of payloads.

    Attributes:
        isend: The communicator's MPI_Isend.
        pending: (request, memory that must stay alive), in the order of sending.
        test_at: The number of pending sends at which the next thread that sends tests them.
    """

    def __init__(self, isend: Callable[..., MPI.Request], eager_tag: int, payload_tag: int) -> None:
        self.pending: deque[tuple[Request, Part]] = deque()
        self.test_at = MAX_PENDING
        self.isend = isend
        self._eager_tag, self._payload_tag = eager_tag, payload_tag
        self._byte = MPI.BYTE
        self._lock = threading.RLock()  # reentrant: a signal's handler may send within any call
        self._testing = threading.Lock()

    def start_one(self, to: int, message: bytes) -> None:
        """Send an eager message that has no payloads."""
        # One call into C starts the send and keeps its request and memory: an exception that a
        # signal's handler raises comes before the call or behind it.
        spec = (message, self._byte)
        sent = map(self.isend, (spec,), (to,), (self._eager_tag,))
        self.pending.extend(zip(sent, (message,), strict=False))

    def start(self, to: int, messages: Sequence[bytes], payloads: Sequence[Part]) -> None:
        """Send the eager messages of one message and its payloads.

        Blocks: until payloads on a device are computed.
        """
        ready = [
            device_p2p.to_send(memory) if isinstance(memory, torch.Tensor) else (memory, None)
            for memory in payloads
        ]
        # The receiver posts receives in the order of eager messages, so no payload of another
        # message may be sent in between, and none may be announced.
        kept: list[Part] = [*messages]
        specs: list[object] = [(message, self._byte) for message in messages]
        devices: list[Device | None] = [None] * len(messages)
        for memory, device in ready:
            pieces = pieces_of(memory)
            specs += pieces
            kept += [memory] * len(pieces)
            devices += [device] * len(pieces)
        tags = [self._eager_tag] * len(messages)
        tags += [self._payload_tag] * (len(specs) - len(messages))
        starts: Iterable[Request]
        if any(devices):
            starts = map(start_request, devices, repeat(self.isend), specs, repeat(to), tags)
        else:
            starts = map(self.isend, specs, repeat(to), tags)
        with self._lock:
            # One call into C, as in ``start_one``: no part of a message is left out.
            self.pending.extend(zip(starts, kept, strict=False))

    def test(self) -> None:
        """Remove completed sends; a send to a failed rank counts as completed.

        Any thread may call it; it does nothing while another thread does.
        """
        pending = self.pending
        if self._testing.locked():
            return
        with self._testing:
            try:
                # Interrupted in between, the next test of the same request succeeds at once.
                while pending and pending[0][0].Test():
                    pending.popleft()
            except Exception as error:
                if not mpi_errors.is_mpi_error(error) or not mpi_errors.is_failure(error):
                    raise
                pending.popleft()

    def reclaim(self) -> None:
        """Test the sends, and again when twice as many are pending: a few tests for each send.

        A thread that sends many messages may leave the polling thread no time; completed sends that
        nobody tests keep their memory, which the garbage collector scans.
        """
        with agreement_lock.lock:
            self.test()
        self.test_at = max(MAX_PENDING, 2 * len(self.pending))
