"""Point-to-point messages of a process group: send, recv, isend, irecv.

Messages are not queued behind the group's collectives. They match by sender and tag in the order of
sending (MPI-4.1 §3.5); a receive may accept any sender. A thread that waits tests its request, so a
receive without a message raises ``CommTimeout`` and is withdrawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import profiler as torch_profiler

from mpidist.comm import arguments, device_p2p, profiling
from mpidist.comm.execution import Execution
from mpidist.comm.group_settings import GroupSettings
from mpidist.comm.memory import buffer
from mpidist.comm.memory.device_request import start_request
from mpidist.comm.memory.stream import Event
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import Request
from mpidist.comm.posted_receives import ReceiveQueue
from mpidist.comm.work import RequestWork, release_orphans
from mpidist.errors import MpidistError

Tensor = torch.Tensor


@dataclass(frozen=True)
class P2POp:
    """One message of a batch.

    Attributes:
        op: ``"isend"`` or ``"irecv"``.
        tensor: The tensor to send, or to receive into.
        peer: The other rank in the group; None for a receive from any.
        tag: The message's tag.
    """

    op: str
    tensor: Tensor
    peer: int | None
    tag: int = 0


class PointToPoint(Execution):
    """The message calls of a process group."""

    def __init__(self, comm: Communicator, settings: GroupSettings) -> None:
        super().__init__(comm, settings)
        self._receives = ReceiveQueue(self._mpi)

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send a tensor (any shape and dtype) to rank ``dst``.

        Blocks: until the tensor may be changed; for long messages, until the receive has started.

        Raises:
            CommTimeout: The group's timeout has passed.
        """
        send = self._send
        if torch_profiler._is_profiler_enabled:
            send = profiling.messaging(send, self, "send", tensor, dst)
        send(tensor, dst, tag)

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        """Receive into ``tensor`` from rank ``src``, or from any if None; return the sender's rank.

        Raises:
            CommTimeout: No message within the group's timeout; the receive is withdrawn.
            MpidistError: The message is longer or shorter than the tensor. A longer one does not
                change the tensor.
        """
        receive = self._recv
        if torch_profiler._is_profiler_enabled:
            receive = profiling.messaging(receive, self, "recv", tensor, src)
        return receive(tensor, src, tag)

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> RequestWork:
        """Start a send; the tensor must not be changed before the handle's ``wait`` returns."""
        start = self._isend
        if torch_profiler._is_profiler_enabled:
            start = profiling.messaging(start, self, "isend", tensor, dst)
        return start("isend", tensor, dst, tag)

    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> RequestWork:
        """Start a receive; after ``wait`` the tensor holds the message.

        The handle's ``source_rank()`` then returns the sender's rank.
        """
        start = self._irecv
        if torch_profiler._is_profiler_enabled:
            start = profiling.messaging(start, self, "irecv", tensor, src)
        return start("irecv", tensor, src, tag)

    def batch_isend_irecv(self, operations: Sequence[P2POp]) -> list[RequestWork]:
        """Start messages of any order; all receives are posted before the first send."""
        for operation in operations:
            if operation.op not in ("isend", "irecv"):
                raise ValueError(
                    f'{self.where("batch_isend_irecv")} needs op "isend" or "irecv"; got '
                    f"{operation.op!r}"
                )
            if operation.op == "isend" and operation.peer is None:
                raise ValueError(f"{self.where('batch_isend_irecv')} needs a peer for a send")
        works: dict[int, RequestWork] = {}
        for place, item in enumerate(operations):
            if item.op == "irecv":
                works[place] = self.irecv(item.tensor, item.peer, item.tag)
        for place, item in enumerate(operations):
            if item.op == "isend":
                assert item.peer is not None
                works[place] = self.isend(item.tensor, item.peer, item.tag)
        return [works[place] for place in range(len(operations))]

    def _send(self, tensor: Tensor, dst: int, tag: int) -> None:
        self._isend("send", tensor, dst, tag).wait()

    def _recv(self, tensor: Tensor, src: int | None, tag: int) -> int:
        work = self._irecv("recv", tensor, src, tag, waits=True)
        try:
            work.wait()
        finally:
            work.cancel()  # no effect after the end
        return work.source_rank()

    def _isend(self, operation: str, tensor: Tensor, dst: int, tag: int) -> RequestWork:
        self._require_usable(operation)
        where = self.where(operation)
        arguments.tensor(where, tensor, "tensor")
        arguments.rank(where, dst, "dst", self.size)
        arguments.tag(where, tag, self._comm.max_tag)
        release_orphans()
        memory, device = device_p2p.to_send(tensor)
        requests = [
            start_request(
                device, self._mpi.Isend, buffer.byte_range(memory, start, length), dst, tag
            )
            for start, length in buffer.pieces(memory.nbytes)
        ]
        return self._request_work(operation, tensor, requests, None, memory, self.peers_of(dst))

    def _irecv(
        self, operation: str, tensor: Tensor, src: int | None, tag: int, waits: bool = False
    ) -> RequestWork:
        self._require_usable(operation)
        where = self.where(operation)
        arguments.tensor(where, tensor, "tensor")
        arguments.writable(where, tensor, "tensor")
        if src is not None:
            arguments.rank(where, src, "src", self.size)
        arguments.tag(where, tag, self._comm.max_tag)
        release_orphans()
        memory, device, arrive = device_p2p.to_receive(tensor)
        spans = list(buffer.pieces(memory.nbytes))
        if src is None and len(spans) > 1:
            raise ValueError(
                f"{where} from any source takes at most {buffer.MAX_COUNT} bytes; got "
                f"{memory.nbytes}; name src"
            )
        source = MPI.ANY_SOURCE if src is None else src
        receives = [
            self._receives.post(
                buffer.byte_range(memory, start, length), source, tag, waits, device
            )
            for start, length in spans
        ]

        def finish() -> tuple[int, Sequence[Event]]:
            for receive in receives:
                if receive.error is not None:
                    raise receive.error
            sent = sum(receive.received for receive in receives)
            if any(receive.received != receive.nbytes for receive in receives):
                raise MpidistError(
                    f"{where} expected {memory.nbytes} bytes (shape {tuple(tensor.shape)}, "
                    f"{tensor.dtype}); "
                    f"rank {receives[0].sender} sent {sent}"
                )
            return receives[0].sender, arrive()

        return self._request_work(operation, tensor, receives, finish, memory, self.peers_of(src))

    def _request_work(
        self,
        operation: str,
        tensor: Tensor,
        requests: Sequence[Request],
        finish: Callable[[], tuple[int, Sequence[Event]]] | None,
        memory: Tensor,
        peers: Sequence[int],
    ) -> RequestWork:
        request = requests[0] if len(requests) == 1 else _Series(requests)
        work = RequestWork(
            operation,
            tensor,
            request,
            self.where(operation),
            self.journal,
            self.timeout_s,
            self._members,
            finish,
            peers,
        )
        work.kept = memory  # as long as the request
        return work


class _Series:
    """Requests of one tensor past MPI's count limit, as one request."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests: list[Any] = list(requests)

    def Test(self, status: MPI.Status | None = None) -> bool:
        while self._requests and self._requests[0].Test(status):
            self._requests.pop(0)
        return not self._requests

    def Wait(self, status: MPI.Status | None = None) -> None:
        for request in self._requests:
            request.Wait()

    def Cancel(self) -> None:
        for request in self._requests:
            request.Cancel()
