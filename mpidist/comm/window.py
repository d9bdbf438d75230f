"""One-sided access to a tensor of each rank: put, signal, and the memory of other ranks as tensors.

Ranks of a node map tensors of ``ProcessGroup.allocate``: a put copies straight into the other
rank's memory, in the calling thread, and ``map_remote_tensor`` copies nothing. Memory on another
node, and any other tensor, is written by messages (``window_channel``), which the other rank's
threads receive into place without a call of its program. Decision 0022 has the measurements.

Letters: W ranks of the group.

Source: torch's ``Window`` (torch/csrc/distributed/c10d/Window.hpp), whose names and meanings these
are; MPI-4.1 chapter 12, whose Put and Flush are one put here.
"""

from __future__ import annotations

import ctypes
import math
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any

import torch

from mpidist.comm.algorithms import node_memory
from mpidist.comm.execution import arguments
from mpidist.comm.execution.work import Work
from mpidist.comm.memory import buffer
from mpidist.comm.messages import receive_poller
from mpidist.comm.messages.request_work import RequestWork
from mpidist.comm.mpi import backoff, exited_ranks
from mpidist.comm.window_channel import AnswerWait, Exposed, Put, SignalWait, WindowChannel
from mpidist.dynamo import untraced
from mpidist.errors import DisagreementError, GroupError, MpidistError, RankFailureError

Tensor = torch.Tensor

_TESTS = 200  # of a signal, before a thread that waits for it enters the journal
# A copy up to this size is an assignment of memory, which takes a third of the time of a call of
# memmove but keeps Python's lock.
_SHORT_BYTES = 16 << 10


class WindowAccessType(Enum):
    """How this rank reaches another's memory, in torch's words."""

    UNIFIED = 0  # mapped: loads and stores of this rank work on it
    SEPARATE = 1  # by messages


@dataclass(frozen=True)
class WindowAttr:
    """Attributes of a window for one rank.

    Attributes:
        access_type: How this rank reaches that rank's memory.
    """

    access_type: WindowAccessType


@dataclass(frozen=True)
class _Facts:
    """One rank's tensor, as the others learn of it.

    Attributes:
        shape: Of the tensor.
        dtype: Its name.
        offset: First byte of the tensor in the rank's arena; -1 for a tensor of other memory, or
            without elements.
    """

    shape: tuple[int, ...]
    dtype: str
    offset: int


class _Registered:
    """A registration: each rank's tensor, and where this rank maps it.

    Attributes:
        channel: The messages of the group's windows.
        exposed: This rank's part, which messages work on.
        numels: Elements of each rank's tensor.
        mapped: Each rank's tensor in this rank's memory; None where it is not mapped.
        addresses: Address of each; 0 where it is not mapped.
        views: The memory of each; of no bytes where it is not mapped.
    """

    def __init__(
        self,
        channel: WindowChannel,
        exposed: Exposed,
        numels: Sequence[int],
        mapped: Sequence[Tensor | None],
    ) -> None:
        self.channel = channel
        self.exposed = exposed
        self.dtype = exposed.tensor.dtype
        self.itemsize = exposed.tensor.element_size()
        self.numels = numels
        self.mapped = mapped
        self.addresses = [0 if tensor is None else tensor.data_ptr() for tensor in mapped]
        self.views = [
            memoryview(b"" if tensor is None else buffer.memory(tensor.data_ptr(), tensor.nbytes))
            for tensor in mapped
        ]


class _SignalWork(RequestWork):
    """Handle of a wait for a signal; one that is dropped takes no signal."""

    __slots__ = ()

    def __del__(self) -> None:
        pass


@untraced
class Window:
    """A tensor of each rank of a group, which the other ranks write to and may map.

    Made by ``ProcessGroup.window``. Calls of any number of threads may run at the same time, except
    ``tensor_register`` and ``tensor_deregister``. A window that is dropped without
    ``tensor_deregister`` keeps its memory until the group is closed.

    A put is complete when its call, or the ``wait`` of its work, returns: the data are in the other
    rank's memory, and that rank sees them after it has waited for a signal that was sent behind the
    put, or after a barrier. Signals between two ranks are counted: each ``wait_signal`` takes one.

    Args:
        group: The group.
        channel: Returns the messages of the group's windows; the first call is collective.
    """

    def __init__(self, group: Any, channel: Callable[[], WindowChannel]) -> None:
        self._group = group
        self._state = group._state
        self._channel_of_group = channel
        self._registered: _Registered | None = None
        # One entry for each put that a thread has begun and whose copy, or send, has not begun or
        # not ended. Appended before the look at _registered.
        self._under_way: deque[None] = deque()
        self._world_ranks = group.world_ranks
        self._size = group.size

    @property
    def tensor(self) -> Tensor | None:
        """This rank's registered tensor; None without one."""
        registered = self._registered
        return None if registered is None else registered.exposed.tensor

    def tensor_register(self, tensor: Tensor, owning: bool = True) -> None:
        """Let the other ranks write to a tensor, and map it if ``allocate`` made it.

        Collective: over the group, in the order of its operations.

        Blocks: until all ranks have called it.

        Args:
            tensor: A contiguous host tensor of any shape; the dtype is the same on all ranks.
            owning: Accepted for torch's sake. The window keeps the tensor alive in either case,
                because other ranks may write to it.

        Raises:
            TypeError, ValueError: This rank's tensor cannot be registered.
            DisagreementError: Another rank's cannot, or the dtypes differ (all other ranks).
            GroupError: A tensor is registered (this rank).
        """
        self._register(lambda: tensor)

    def register_new(
        self, size: int | Sequence[int], dtype: torch.dtype, tensor: Tensor | None = None
    ) -> None:
        """Register a new tensor of ``allocate``, zeros; as ``tensor_register``."""
        where = self._state.where("window")

        def make() -> Tensor:
            if tensor is not None:
                raise ValueError(f"{where} takes a tensor or a size, not both")
            # All that ``allocate`` refuses, which would tell the other ranks by itself.
            shape = arguments.shape(where, size)
            arguments.dtype(where, dtype)
            allocated: Tensor = self._group.allocate(shape, dtype)
            return allocated.zero_()

        self._register(make)

    def tensor_deregister(self) -> None:
        """End the other ranks' access, after the puts of all ranks have arrived.

        Tensors of ``map_remote_tensor`` must not be used from here on: that rank may give the
        memory to another tensor. Signals that were not waited for are dropped, with a
        ResourceWarning on their receiver.

        Collective: over the group, in the order of its operations.

        Blocks: until all ranks have called it, and their puts are complete.

        Raises:
            GroupError: No tensor is registered (this rank).
            CommTimeout, RankFailureError: A put of this rank does not end.
        """
        operation = "tensor_deregister"
        group, registered = self._group, self._require(operation)
        exposed, channel = registered.exposed, registered.channel
        self._registered = None
        # Other threads' puts that have passed the check above; none waits for another rank.
        backoff.until(lambda: not self._under_way)
        error: MpidistError | None = None
        are_all_complete = False
        try:
            for put in list(exposed.puts):
                try:
                    self._work(operation, AnswerWait(put), None, put.dst).wait()
                except RankFailureError:
                    raise
                except MpidistError as raised:
                    # Raised below: the other ranks wait for this one.
                    error = error or raised
            sent = torch.tensor([[each, error is None] for each in exposed.sent], device="cpu")
            received = torch.empty_like(sent)
            # The barrier of this call: each rank needs the numbers of each.
            group.all_to_all_single(received, sent)
            expected, are_complete = received.t().tolist()
            are_all_complete = all(are_complete)
        finally:
            channel.remove(exposed, are_all_complete)
        if error is not None:
            raise error
        lost = [
            f"{number} of rank {rank}"
            for rank in range(group.size)
            if (number := int(expected[rank]) - exposed.arrived[rank] + len(exposed.signals[rank]))
        ]
        if lost:
            warnings.warn(
                f"{group.where(operation)}: signals were never waited for: {', '.join(lost)}",
                ResourceWarning,
                2,
            )

    def put(
        self,
        tensor: Tensor,
        dst_rank: int,
        target_offset_nelems: int = 0,
        async_op: bool = False,
        timeout: float | timedelta | None = None,
    ) -> Work | RequestWork | None:
        """Write a tensor into rank ``dst_rank``'s, from element ``target_offset_nelems`` on.

        That rank takes no part. Its autograd does not see the change.

        Blocks: until the data are there; by messages, until a thread of that rank has received
        them. With ``async_op`` a put by messages only starts, and the tensor must not be changed
        before ``wait`` has returned.

        Args:
            tensor: A host tensor of the window's dtype; its elements are written in their order.
            dst_rank: Rank in the group; may be this one.
            target_offset_nelems: In elements of the other rank's tensor.
            async_op: Return a work.
            timeout: Of a synchronous put; the group's if None.

        Returns:
            A work if ``async_op``.

        Raises:
            TypeError: Another dtype, or no tensor.
            ValueError: It does not fit the other rank's tensor; nothing is written.
            GroupError: No tensor is registered, or the group is closed.
            RankFailureError: That rank has died, or its program has ended.
            CommTimeout: Not complete in time.
            MpidistError: That rank has deregistered its tensor after an error.
        """
        under_way, request = self._under_way, None
        under_way.append(None)
        try:
            registered = self._require("put")
            source, numel = self._checked(registered, tensor, dst_rank, target_offset_nelems)
            itemsize = registered.itemsize
            nbytes, offset = numel * itemsize, target_offset_nelems * itemsize
            address = registered.addresses[dst_rank]
            if address and nbytes <= _SHORT_BYTES:
                view = buffer.memory(source.data_ptr(), nbytes)
                registered.views[dst_rank][offset : offset + nbytes] = view
            elif address:
                ctypes.memmove(address + offset, source.data_ptr(), nbytes)
            elif nbytes:
                request = self._start(registered, dst_rank, offset, source)
        finally:
            under_way.pop()
        if request is None:
            return self._ended("put", (tensor,)) if async_op else None
        work = self._work("put", request, source, dst_rank)
        work.tensor = tensor
        if async_op:
            return work
        work.wait(timeout)
        return None

    def signal(
        self, peer_rank: int, async_op: bool = False, timeout: float | timedelta | None = None
    ) -> Work | None:
        """Send a signal to a rank, behind this thread's earlier puts to it in this window.

        Blocks: no.

        Args:
            peer_rank: Rank in the group; may be this one.
            async_op: Return a work, which is complete.
            timeout: Accepted for torch's sake.

        Raises:
            GroupError, RankFailureError, ValueError: As ``put``.
        """
        registered = self._require("signal")
        if type(peer_rank) is not int or not 0 <= peer_rank < self._size or exited_ranks.has_any():
            self._require_alive("signal", peer_rank)
        try:
            registered.channel.signal(registered.exposed, peer_rank)
        except Exception as error:
            raise self._state.message_error(error, "signal") from error
        return self._ended("signal", ()) if async_op else None

    def wait_signal(
        self, peer_rank: int, async_op: bool = False, timeout: float | timedelta | None = None
    ) -> RequestWork | None:
        """Wait for a signal of a rank, and take it.

        After it this rank sees what that rank had put before the signal.

        Blocks: the calling thread, which receives messages meanwhile; with ``async_op`` no, and
        the signal is taken by ``wait`` or ``is_completed`` of the work.

        Args:
            peer_rank: Rank in the group; may be this one.
            async_op: Return a work.
            timeout: Of a synchronous wait; the group's if None.

        Raises:
            CommTimeout: No signal in time; one that arrives later is kept for the next wait.
            RankFailureError: That rank has died or ended, and its signals are used up.
            GroupError, ValueError: As ``put``.
        """
        registered = self._require("wait_signal")
        if type(peer_rank) is not int or not 0 <= peer_rank < self._size:
            self._require_rank("wait_signal", peer_rank)
        channel, exposed = registered.channel, registered.exposed
        if not async_op:
            take = channel.take
            try:
                for _ in range(_TESTS):
                    if take(exposed, peer_rank):
                        return None
            except Exception as error:
                raise self._state.message_error(error, "wait_signal") from error
        request = SignalWait(channel, exposed, peer_rank)
        work = self._work("wait_signal", request, None, peer_rank, _SignalWork)
        if async_op:
            return work
        work.wait(timeout)
        return None

    def map_remote_tensor(self, rank: int) -> Tensor:
        """Return rank ``rank``'s tensor in this rank's memory: no copy, and no protection.

        Loads and stores of the two ranks are ordered by signals and barriers alone.

        Returns:
            A tensor of that rank's shape, on the CPU. It must not be used after
            ``tensor_deregister``: the memory stays mapped, and may belong to another tensor of that
            rank by then.

        Raises:
            MpidistError: That rank's memory is on another node, or not of this group's
                ``allocate``, or ``allocate`` had none that ranks share.
            GroupError, ValueError: As ``put``.
        """
        registered = self._require("map_remote_tensor")
        self._require_rank("map_remote_tensor", rank)
        mapped = registered.mapped[rank]
        if mapped is None:
            group = self._group
            reason = (
                "is in plain memory, not in that of the group's allocate"
                if group._comm.nodes[rank] == group._comm.nodes[group.rank]
                else "is on another node"
            )
            raise MpidistError(
                f"{group.where('map_remote_tensor')}: the tensor of rank {rank} {reason}"
            )
        return mapped

    def get_attr(self, peer_rank: int) -> WindowAttr:
        """Return how this rank reaches another's tensor: UNIFIED if ``map_remote_tensor`` works.

        Raises:
            GroupError, ValueError: As ``put``.
        """
        registered = self._require("get_attr")
        self._require_rank("get_attr", peer_rank)
        is_mapped = registered.mapped[peer_rank] is not None
        return WindowAttr(WindowAccessType.UNIFIED if is_mapped else WindowAccessType.SEPARATE)

    def _register(self, make: Callable[[], Tensor]) -> None:
        operation = "tensor_register"
        group = self._group
        channel = self._channel_of_group()
        error: Exception | None = None
        facts: _Facts | None = None
        try:
            if self._registered is not None:
                raise GroupError(
                    f"{group.where(operation)}: a tensor is registered; call tensor_deregister "
                    "first, on all ranks"
                )
            tensor = make()
            facts = self._facts(operation, tensor)
        except Exception as raised:
            error = raised
        told = None if error is None else f"{type(error).__name__}: {error}"
        row = None if facts is None else tuple(vars(facts).values())
        rows = group.all_gather_object((told, row))
        if error is not None:
            raise error
        every = self._agreed(operation, rows)
        mapped = [self._mapped(rank, each, tensor) for rank, each in enumerate(every)]
        maps = [each is not None for each in mapped]
        # The ranks of a node map all arenas of the node, or none has a tensor in one.
        nodes, is_reached = group._comm.nodes, facts is not None and facts.offset >= 0
        mapped_by = [
            rank == group.rank or (is_reached and node == nodes[group.rank])
            for rank, node in enumerate(nodes)
        ]
        exposed = Exposed(channel.next_number(), tensor, maps, mapped_by)
        # Open before any rank returns: its first put may arrive at once.
        channel.open(exposed)
        try:
            group.barrier()
        except Exception:
            channel.remove(exposed, are_all_complete=False)
            raise
        if not channel.is_empty():
            receive_poller.watch(channel)
        numels = [math.prod(each.shape) for each in every]
        self._registered = _Registered(channel, exposed, numels, mapped)

    def _facts(self, operation: str, tensor: Tensor) -> _Facts:
        where = self._state.where(operation)
        arguments.tensor(where, tensor, "tensor")
        arguments.writable(where, tensor, "tensor")
        if not tensor.is_cpu:
            raise ValueError(f"{where} needs a tensor in host memory; got {tensor.device}")
        if not buffer.is_plain(tensor):
            raise ValueError(
                f"{where} needs a contiguous tensor; got shape {tuple(tensor.shape)}, strides "
                f"{tensor.stride()}"
            )
        memory = node_memory.of(self._group._comm)
        offset = -1 if memory is None or not tensor.numel() else memory.offset(tensor)
        return _Facts(tuple(tensor.shape), str(tensor.dtype), offset)

    def _agreed(self, operation: str, rows: Sequence[tuple[str | None, Any]]) -> list[_Facts]:
        where = self._state.where(operation)
        told = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(rows) if text is not None]
        if told:
            raise DisagreementError(f"{where} was refused. {'; '.join(told)}")
        every = [_Facts(*row) for _, row in rows]
        if len({each.dtype for each in every}) > 1:
            listed = "; ".join(f"rank {rank}: {each.dtype}" for rank, each in enumerate(every))
            raise DisagreementError(f"{where} needs one dtype on all ranks. {listed}")
        return every

    def _mapped(self, rank: int, facts: _Facts, own: Tensor) -> Tensor | None:
        comm = self._group._comm
        if rank == comm.rank:
            return own
        memory = node_memory.of(comm)
        if memory is None or facts.offset < 0 or comm.nodes[rank] != comm.nodes[comm.rank]:
            return None
        return memory.view(rank, facts.offset, facts.shape, own.dtype)

    def _start(self, registered: _Registered, dst: int, offset: int, source: Tensor) -> Put:
        try:
            return registered.channel.put(
                registered.exposed, self._state.where("put"), dst, offset, source
            )
        except Exception as error:
            raise self._state.message_error(error, "put") from error

    def _checked(
        self, registered: _Registered, tensor: Tensor, dst: int, offset: int
    ) -> tuple[Tensor, int]:
        """Return the contiguous form of a put's tensor, and its elements, after all checks."""
        if type(tensor) is not Tensor or not tensor.is_cpu:
            arguments.tensor(self._state.where("put"), tensor, "tensor")
            if not tensor.is_cpu:
                raise ValueError(
                    f"{self._state.where('put')} needs a tensor in host memory; got {tensor.device}"
                )
        if type(dst) is not int or not 0 <= dst < self._size or exited_ranks.has_any():
            self._require_alive("put", dst)
        if tensor.dtype is not registered.dtype:
            raise TypeError(
                f"{self._state.where('put')} needs a tensor of the window's dtype, "
                f"{registered.dtype}; got {tensor.dtype}"
            )
        numel, room = tensor.numel(), registered.numels[dst]
        if type(offset) is not int or offset < 0 or offset + numel > room:
            raise ValueError(
                f"{self._state.where('put')}: {numel} elements at {offset!r} do not fit the "
                f"{room} elements of rank {dst}"
            )
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return tensor, numel
        # Also of a tensor that is not dense.
        arguments.tensor(self._state.where("put"), tensor, "tensor")
        return tensor.detach().resolve_conj().resolve_neg().contiguous(), numel

    def _require(self, operation: str) -> _Registered:
        state, registered = self._state, self._registered
        if state.is_closed or state.failure is not None:
            state.require_usable(operation)
        if registered is None:
            raise GroupError(
                f"{self._state.where(operation)} needs a registered tensor: call tensor_register "
                "first, on all ranks"
            )
        return registered

    def _require_rank(self, operation: str, rank: int) -> None:
        if type(rank) is not int or not 0 <= rank < self._size:
            arguments.rank(self._state.where(operation), rank, "the rank", self._size)

    def _require_alive(self, operation: str, rank: int) -> None:
        self._require_rank(operation, rank)
        if exited_ranks.has_any():
            gone = exited_ranks.among((self._world_ranks[rank],))
            if gone:
                raise exited_ranks.failure(self._state.where(operation), gone)

    def _ended(self, operation: str, tensors: Sequence[Tensor]) -> Work:
        work = Work(operation, tensors, self._state.where(operation))
        work.set_result(tensors)
        return work

    def _work(
        self,
        operation: str,
        request: Any,
        memory: Tensor | None,
        peer: int,
        kind: type[RequestWork] = RequestWork,
    ) -> RequestWork:
        return kind(self._state, operation, memory, request, peer, memory)
