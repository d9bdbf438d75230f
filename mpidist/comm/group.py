"""``ProcessGroup``: ranks that communicate, with all calls of users on one object."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.autograd import profiler as torch_profiler

from mpidist.comm import collectives, objects
from mpidist.comm.algorithms import node_memory, tuning, tuning_runs
from mpidist.comm.algorithms.reduce_op import SUM, ReduceOp
from mpidist.comm.execution import arguments, profiling
from mpidist.comm.execution.execution import Execution
from mpidist.comm.execution.fast_path import FastPath
from mpidist.comm.execution.group_settings import GroupSettings
from mpidist.comm.execution.group_state import GroupState
from mpidist.comm.execution.operation import Facts, Operation, Tensors
from mpidist.comm.execution.progress import Progress
from mpidist.comm.execution.work import Work, seconds
from mpidist.comm.messages.object_messages import ObjectMessages
from mpidist.comm.messages.p2p import Messages, P2POp
from mpidist.comm.messages.request_work import RequestWork
from mpidist.comm.monitored_barrier import MonitoredBarrier
from mpidist.comm.mpi import autograd_mode, closed_communicators
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.tags import Tag
from mpidist.comm.subgroups import Subgroups
from mpidist.comm.watchdog import watchdog
from mpidist.dynamo import untraced
from mpidist.errors import MpidistError
from mpidist.weak_registry import WeakRegistry

Tensor = torch.Tensor

_CLOSE_S = 30.0
_groups: WeakRegistry[ProcessGroup] = WeakRegistry()


def open_groups() -> list[ProcessGroup]:
    """Return this process's groups that are not closed, and to which something refers."""
    return [group for group in _groups.alive() if not group.is_closed]


@untraced
class ProcessGroup:
    """Ranks that communicate with each other, on a communicator of their own.

    Made by ``init`` (all ranks of the job), ``new_group``, ``split`` or ``clone``. The calls are
    the interface of a group of ``torch.distributed``, by its names and meanings; each passes its
    arguments to the part that does the work.

    Every collective is called by all ranks in the same order, with arguments that agree. A
    synchronous call returns when this rank's part has ended (for CUDA tensors: when MPI has
    returned and the current stream waits for the results). With ``async_op=True`` a call returns a
    ``Work``, and the tensors belong to the operation until ``wait`` returns.

    Wrong arguments raise ``ValueError`` or ``TypeError`` before MPI is called. In debug mode
    (``MPIDIST_DEBUG=1``) arguments that disagree, or that are wrong on one rank only, raise
    ``DisagreementError`` on all ranks. MPI's failures raise ``RankFailureError`` or
    ``MpidistError``.

    Attributes:
        name: The group's name, for messages.
        key: Identifies the group; the same text on all its ranks.
        rank: This rank in the group.
        size: W, the number of ranks.
        world_ranks: The members' ranks in the world, in group order.
        on_timeout: ``"abort"`` or ``"raise"``, the same on all ranks.
        journal: The operation that the group executes.
    """

    def __init__(self, comm: Communicator, settings: GroupSettings) -> None:
        self._comm = comm
        self._progress = Progress(settings.name)
        self._closing = threading.Lock()
        self._closer: int | None = None  # the thread that holds it
        self._state = state = GroupState(comm, settings, self._progress.items)
        self.name, self.key = state.name, state.key
        self.rank, self.size, self.world_ranks = state.rank, state.size, state.world_ranks
        self.on_timeout, self.journal = state.on_timeout, state.journal
        self._execution = execution = Execution(state, self._progress, settings.debug)
        self._messages = Messages(state, execution.checks_nan)
        self._object_messages = ObjectMessages(state)
        self._monitored_barrier = MonitoredBarrier(state)
        self._subgroups = Subgroups(execution, type(self))
        self._fast_path = FastPath(execution)
        state.close_fast_path = self._fast_path.close
        # Bound once, because each attribute access in a call costs 30 ns.
        self._launch = execution.launch
        self._require_no_nan = execution.require_no_nan
        self.all_reduce_at_once = self._fast_path.all_reduce
        self.prepared = self._fast_path.prepared
        self._at_once = self._fast_path.take
        self._tables: dict[str, tuning.Table] = {}  # by device type
        watchdog.watch(state)
        _groups.add(self)

    # --- collectives that move data ---

    @property
    def allocates_node_memory(self) -> bool:
        """Return whether ``allocate`` returns memory that all other ranks can read."""
        made = node_memory.of(self._comm)
        return self.size > 1 and self.is_single_node and (made is None or made.is_shared)

    def allocate(self, shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor in memory that the other ranks of the node read without messages.

        In a group of one node ``all_gather_into_tensor`` copies straight from there, where every
        rank's output or input lies in it. The tensor is this rank's own, like any other. A process
        forked from the rank writes to the same memory.

        The memory serves this group's later tensors when nothing refers to the tensor any more, and
        is freed when the group is closed and its last tensor gone; a tensor may outlive the group.
        Where the group is on several nodes, and with one warning where the ranks cannot map each
        other's memory or this rank's part of it is full, the tensor is in plain memory.

        Collective: the first call, over the group; waits behind queued operations. Later calls
        concern this rank alone.

        Args:
            shape: Numbers of elements.
            dtype: The dtype.

        Returns:
            A contiguous tensor on the CPU with undefined values, at the start of a page.

        Raises:
            ValueError: A negative number of elements (this rank).
            TypeError: Not numbers, or not a dtype (this rank).
        """
        with self._execution.checked("allocate") as where:
            sizes = arguments.shape(where, shape)
            arguments.dtype(where, dtype)
        memory = node_memory.of(self._comm)
        if memory is None and self.allocates_node_memory:
            memory = self._launch(
                Operation("allocate", node_memory.make, args=(self.where("allocate"),))
            )
        self._state.require_usable("allocate")
        if memory is None:
            with autograd_mode.allocating():
                return torch.empty(sizes, dtype=dtype, device="cpu")
        return memory.tensor(sizes, dtype)

    def broadcast(self, tensor: Tensor, src: int, async_op: bool = False) -> Work | None:
        """Copy rank ``src``'s tensor (any shape and dtype, equal on all ranks) to all."""
        return self._collective(collectives.broadcast, async_op, (tensor,), src)

    def broadcast_coalesced(
        self, tensors: Tensors, src: int, async_op: bool = False
    ) -> Work | None:
        """Copy rank ``src``'s list of tensors to all, as one operation."""
        return self._collective(collectives.broadcast_coalesced, async_op, tensors, src)

    def barrier(self, async_op: bool = False) -> Work | None:
        """Wait until all ranks have called ``barrier``."""
        return self._collective(collectives.barrier, async_op)

    def all_gather(
        self, tensor_list: Tensors, tensor: Tensor, async_op: bool = False
    ) -> Work | None:
        """Gather each rank's ``tensor`` into a list of W tensors; sizes may differ by rank."""
        return self._collective(collectives.all_gather, async_op, tensor_list, tensor)

    def all_gather_into_tensor(
        self, output: Tensor, input: Tensor, async_op: bool = False
    ) -> Work | None:
        """Gather each rank's ``input`` (N elements) into ``output`` (W·N elements, by rank)."""
        return self._collective(collectives.all_gather_into_tensor, async_op, (output,), (input,))

    def all_gather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, async_op: bool = False
    ) -> Work | None:
        """Execute ``all_gather_into_tensor`` for each pair of two lists, as one operation."""
        return self._collective(collectives.all_gather_into_tensor, async_op, outputs, inputs)

    def gather(
        self,
        tensor: Tensor,
        gather_list: Tensors | None = None,
        dst: int = 0,
        async_op: bool = False,
    ) -> Work | None:
        """Gather each rank's ``tensor`` (equal shapes) into rank ``dst``'s list of W tensors."""
        return self._collective(collectives.gather, async_op, tensor, gather_list, dst)

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: Tensors | None = None,
        src: int = 0,
        async_op: bool = False,
    ) -> Work | None:
        """Copy the i-th of rank ``src``'s W tensors (equal shapes) to rank i's ``tensor``."""
        return self._collective(collectives.scatter, async_op, tensor, scatter_list, src)

    def all_to_all(
        self, output_list: Tensors, input_list: Tensors, async_op: bool = False
    ) -> Work | None:
        """Send ``input_list[i]`` to rank i and receive its tensor in ``output_list[i]``.

        Sizes may differ.
        """
        return self._collective(collectives.all_to_all, async_op, output_list, input_list)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Exchange rows of one tensor with each rank.

        Args:
            output: Receives ``output_split_sizes[i]`` rows from rank i.
            input: Rows of as many elements; ``input_split_sizes[i]`` of them are sent to rank i.
            output_split_sizes: W equal parts if None.
            input_split_sizes: W equal parts if None.
        """
        return self._collective(
            collectives.all_to_all_single,
            async_op,
            output,
            input,
            output_split_sizes,
            input_split_sizes,
        )

    # --- collectives that compute ---

    def all_reduce(self, tensor: Tensor, op: ReduceOp = SUM, async_op: bool = False) -> Work | None:
        """Reduce ``tensor`` (any shape, equal on all ranks) over all ranks, in place.

        All ranks get the same bits. Sums and products of integers wrap around; AVG divides the
        wrapped sum. A sparse COO tensor is reduced by SUM or AVG, may hold different elements on
        each rank, and becomes a coalesced one.
        """
        if isinstance(tensor, Tensor) and not tensor.requires_grad:
            if async_op:
                # Between nodes the group's thread sleeps while it waits; a prepared call does not.
                work = self._fast_path.all_reduce_later(tensor, op) if self.is_single_node else None
                if work is not None:
                    return work
            elif self.all_reduce_at_once(tensor, op):
                return None
        if isinstance(tensor, Tensor) and tensor.layout is torch.sparse_coo:
            return collectives.all_reduce_sparse(self._execution, self, tensor, op, async_op)
        return self._collective(collectives.all_reduce, async_op, tensor, op)

    def all_reduce_coalesced(
        self, tensors: Tensors, op: ReduceOp = SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce each tensor of a list (one dtype, one device) in place, as one operation."""
        return self._collective(collectives.all_reduce_coalesced, async_op, tensors, op)

    def reduce(
        self, tensor: Tensor, dst: int, op: ReduceOp = SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce ``tensor`` over all ranks into rank ``dst``'s; the others' keep their values."""
        return self._collective(collectives.reduce, async_op, tensor, dst, op)

    def reduce_scatter(
        self, output: Tensor, input_list: Tensors, op: ReduceOp = SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce a list of W tensors over all ranks and keep the rank's own in ``output``.

        Args:
            output: As many elements as ``input_list[rank]``.
            input_list: Tensors of any sizes; the i-th has the same size on all ranks.
        """
        return self._collective(collectives.reduce_scatter, async_op, output, input_list, op)

    def reduce_scatter_tensor(
        self, output: Tensor, input: Tensor, op: ReduceOp = SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce ``input`` (W·N elements) over all ranks; keep the rank's own N in ``output``."""
        return self._collective(
            collectives.reduce_scatter_tensor, async_op, (output,), (input,), op
        )

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, op: ReduceOp = SUM, async_op: bool = False
    ) -> Work | None:
        """Execute ``reduce_scatter_tensor`` for each pair of two lists, as one operation."""
        return self._collective(collectives.reduce_scatter_tensor, async_op, outputs, inputs, op)

    def _collective(
        self, describe: Callable[..., Operation], async_op: bool, *arguments: Any
    ) -> Work | None:
        if not async_op and self._at_once(describe, arguments):
            return None
        return self._launch(describe(self._execution, *arguments), async_op)

    # --- messages ---

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send a tensor (any shape and dtype) to rank ``dst``.

        Blocks: until the tensor may be changed; for long messages, until the receive has started.

        Raises:
            CommTimeout: The group's timeout has passed. As after any exception that leaves the call
                (of a handler of a signal), the message may be under way: its memory is kept and
                must not be changed.
        """
        if torch_profiler._is_profiler_enabled:
            send = profiling.messaging(self._messages.send, self._state, "send", tensor, dst)
            send(tensor, dst, tag)
        else:
            self._messages.send(tensor, dst, tag)

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        """Receive into ``tensor`` from rank ``src``, or from any if None; return the sender's rank.

        Raises:
            CommTimeout: No message within the group's timeout; the receive is withdrawn. As after
                any exception that leaves the call, the tensor holds the whole message, or the next
                receive gets it.
            MpidistError: The message is longer or shorter than the tensor. A longer one does not
                change the tensor.
        """
        if torch_profiler._is_profiler_enabled:
            recv = profiling.messaging(self._messages.recv, self._state, "recv", tensor, src)
            return recv(tensor, src, tag)
        return self._messages.recv(tensor, src, tag)

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> RequestWork:
        """Start a send; the tensor must not be changed before the handle's ``wait`` returns."""
        if torch_profiler._is_profiler_enabled:
            isend = profiling.messaging(self._messages.isend, self._state, "isend", tensor, dst)
            return isend("isend", tensor, dst, tag)
        return self._messages.isend("isend", tensor, dst, tag)

    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> RequestWork:
        """Start a receive; after ``wait`` the tensor holds the message.

        The handle's ``source_rank()`` then returns the sender's rank.
        """
        if torch_profiler._is_profiler_enabled:
            irecv = profiling.messaging(self._messages.irecv, self._state, "irecv", tensor, src)
            return irecv("irecv", tensor, src, tag)
        return self._messages.irecv("irecv", tensor, src, tag)

    def batch_isend_irecv(self, operations: Sequence[P2POp]) -> list[RequestWork]:
        """Start messages of any order; all receives are posted before the first send."""
        return self._messages.batch(operations, self.isend, self.irecv)

    # --- objects ---

    def broadcast_object(
        self, obj: object = None, src: int = 0, *, data_only: bool | None = None
    ) -> Any:
        """Return rank ``src``'s object on all ranks; the others' argument is ignored."""
        return objects.broadcast_object(self._execution, obj, src, data_only)

    def broadcast_object_list(
        self, object_list: list[object], src: int = 0, *, data_only: bool | None = None
    ) -> None:
        """Overwrite every rank's list with rank ``src``'s."""
        object_list[:] = self.broadcast_object(object_list, src, data_only=data_only)

    def all_gather_object(self, obj: object, *, data_only: bool | None = None) -> list[Any]:
        """Return the W ranks' objects, in rank order."""
        return objects.all_gather_object(self._execution, obj, data_only)

    def gather_object(
        self, obj: object, dst: int = 0, *, data_only: bool | None = None
    ) -> list[Any] | None:
        """Return the W ranks' objects on rank ``dst``, None elsewhere."""
        return objects.gather_object(self._execution, obj, dst, data_only)

    def scatter_object(
        self,
        object_list: Sequence[object] | None = None,
        src: int = 0,
        *,
        data_only: bool | None = None,
    ) -> Any:
        """Return the rank's object of rank ``src``'s list of W."""
        return objects.scatter_object(self._execution, object_list, src, data_only)

    def send_object(self, obj: object, dst: int, *, data_only: bool | None = None) -> None:
        """Send an object to rank ``dst``; matches its ``recv_object``. Not collective.

        Blocks: until the object may be changed; for large ones, until they are received.

        Raises:
            NotPlainData: The object must be data, and is not; nothing was sent.
            CommTimeout: Not received within the group's timeout. The object is still under way.
            RankFailureError: Rank ``dst`` died, or its program has ended.
        """
        send = self._object_messages.send
        if torch_profiler._is_profiler_enabled:
            send = profiling.calling(send, self._state, "send_object")
        send(obj, dst, data_only)

    def recv_object(
        self, src: int | None = None, *, data_only: bool | None = None
    ) -> tuple[Any, int]:
        """Receive an object from rank ``src``, or from any; return it and the sender's rank.

        Not collective.

        Raises:
            CommTimeout: No object, or not all of it, within the group's timeout. As after any
                exception that leaves the call, the next one returns the object.
            FrameError: The message is a pickle, and data is asked for; or it is not an object. The
                message is received.
        """
        receive = self._object_messages.receive
        if torch_profiler._is_profiler_enabled:
            receive = profiling.calling(receive, self._state, "recv_object")
        return receive(src, data_only)

    # --- order, barrier with a timeout ---

    def in_order(
        self,
        function: Callable[[], object],
        async_op: bool = True,
        device: torch.device | None = None,
        *,
        operation: str = "in_order",
        facts: Facts = (),
        results: Tensors = (),
    ) -> Any:
        """Execute ``function()`` as one operation of the group.

        Operations that ``function`` issues, on any group, have ended when their calls return. What
        other threads of this rank issue meanwhile is queued behind it, so an operation of several
        stages does not mix with others.

        Collective: over the group, as far as ``function`` is.

        Args:
            async_op: Execute on the group's thread, behind the queue; else in the calling thread,
                if nothing is queued.
            device: CUDA device on which ``function`` queues work. That work follows the present
                work of the current stream; work queued after ``wait`` follows it.
            operation: The name in messages and reports.
            facts: Values that must be equal on all ranks; compared in debug mode.
            results: Value of the Work's future.

        Returns:
            A Work if ``async_op``, else what ``function`` has returned.
        """
        return self._execution.in_order(function, async_op, device, operation, facts, results)

    def monitored_barrier(
        self, timeout: float | timedelta | None = None, wait_all_ranks: bool = True
    ) -> None:
        """Wait until all ranks have called it, at most ``timeout`` (the group's by default).

        Collective: over the group.

        Args:
            timeout: Seconds or a timedelta. With 0, rank 0 probes once for arrivals, as torch's
                barrier on Gloo.
            wait_all_ranks: Accepted for torch's signature. The error always names all missing
                ranks.

        Raises:
            CommTimeout: On every rank that has arrived, naming the missing ranks; if rank 0 is
                missing, naming rank 0.
            RankFailureError: On every rank that has arrived, if a rank's program ended more
                than 2 s ago.
        """
        wait = self._monitored_barrier.wait
        if torch_profiler._is_profiler_enabled:
            wait = profiling.calling(wait, self._state, "monitored_barrier")
        wait(timeout)

    # --- other groups ---

    def new_group(
        self,
        ranks: Sequence[int],
        name: str | None = None,
        timeout: float | timedelta | None = None,
        on_timeout: str | None = None,
        key: str | None = None,
    ) -> ProcessGroup | None:
        """Make a group of some of this group's ranks.

        Collective: over ``ranks`` alone; others may call it too, and get None. Members must agree
        on the order of the calls with the same ranks and key.

        Args:
            ranks: Distinct ranks of this group, in the new group's order.
            name: The name in messages; derived from the ranks if None.
            timeout: Seconds or a timedelta, 0 for no limit; this group's if None.
            on_timeout: See ``init``; this group's if None.
            key: The same on all members; ``name`` if None, which then must be the same, too.

        Blocks: until all of ``ranks`` have called it, at most this group's timeout.

        Raises:
            ValueError: Ranks repeated or out of range.
            CommTimeout: Not all members called it in time (members that wait); the watchdog has
                printed what each rank does, and this group has failed.
            RankFailureError: A member died, or its program ended more than 2 s ago
                (members that wait).
            DisagreementError: ``on_timeout`` differs between the members (all members).
        """
        return self._subgroups.new_group(ranks, name, timeout, on_timeout, key)

    def split(
        self,
        color: int | None,
        key: int = 0,
        timeout: float | timedelta | None = None,
        on_timeout: str | None = None,
    ) -> ProcessGroup | None:
        """Divide the group: the ranks of each ``color`` form a new group.

        Collective: over this group. Waits behind queued operations.

        Args:
            color: At least 0, the same for the ranks of one new group; None to join none.
            key: Orders the ranks of the new group; ranks of equal keys keep their order.
            timeout: Seconds or a timedelta, 0 for no limit; this group's if None.
            on_timeout: See ``init``; this group's if None.
        """
        return self._subgroups.split(color, key, timeout, on_timeout)

    def split_by_node(self, timeout: float | timedelta | None = None) -> ProcessGroup:
        """Divide the group into one for each node; its ranks share the node's memory.

        Collective: over this group. Waits behind queued operations.

        Source: MPI-4.1 §7.4.2, MPI_COMM_TYPE_SHARED.
        """
        return self._subgroups.split_by_node(timeout)

    def shrink(
        self,
        exclude: Sequence[int],
        abort: bool = False,
        name: str | None = None,
        timeout: float | timedelta | None = None,
        on_timeout: str | None = None,
    ) -> ProcessGroup:
        """Make a group of this group's ranks without some, which may be dead.

        Without a death it works on any MPI. After one it needs ULFM (``mpirun --with-ft ulfm``),
        and also works on a group that has failed. This group stays open; close it, or drop it if it
        has failed.

        Collective: over the ranks that remain, in any state of the excluded ones, which must not
        call it.

        Args:
            exclude: Distinct ranks of this group, at least one and not all; the others keep their
                order. The same on all ranks that remain.
            abort: First fail this group, so that its operations under way return with an error
                (with ULFM; else they go on until MPI has ended them). Without it the group must
                have no operation under way or queued.
            name: The name in messages; derived from this group's if None.
            timeout: Seconds or a timedelta, 0 for no limit; this group's if None.
            on_timeout: See ``init``; this group's if None.

        Blocks: until all ranks that remain have called it, at most the new group's timeout.

        Raises:
            ValueError: Ranks repeated or out of range, none, all, or this rank itself.
            GroupError: The group is closed, or has an operation under way or queued.
            CommTimeout: Not all ranks that remain called it in time, with the same ``exclude``.
            RankFailureError: A rank that should remain is dead, or has ended.

        Source: MPI_Comm_create_group, MPI_Comm_create_from_group (MPI-4.1 §7.4.2).
        """
        return self._subgroups.shrink(exclude, abort, name, timeout, on_timeout)

    def regroup(
        self,
        world_ranks: Sequence[int],
        key: str,
        timeout: float | timedelta | None = None,
    ) -> ProcessGroup:
        """Make a group of ranks of the job that takes the place of this one.

        The new group may lack ranks of this one, and have ranks that were left out before. Without
        a death it works on any MPI. After one it needs ULFM (``mpirun --with-ft ulfm``), and also
        works on a group that has failed. Name, debug mode and ``on_timeout`` are this group's,
        which stays open; close it, or drop it if it has failed.

        Collective: over ``world_ranks``, each on the group that it has; the others take no part.

        Args:
            world_ranks: Distinct ranks of the job, this one among them, in the new group's order.
                The same on all of them.
            key: A text that no earlier call had. The same on all of them.
            timeout: Seconds or a timedelta, 0 for no limit; this group's if None.

        Blocks: until all of ``world_ranks`` have called it, at most the timeout.

        Raises:
            ValueError: Ranks repeated or out of range, or without this one.
            GroupError: The group is closed, or has an operation under way or queued.
            CommTimeout: Not all of ``world_ranks`` called it in time with the same arguments.
            RankFailureError: One of them is dead, or has ended.

        Source: MPI_Comm_create_group, MPI_Comm_create_from_group (MPI-4.1 §7.4.2).
        """
        return self._subgroups.regroup(world_ranks, key, timeout)

    def clone(self, name: str | None = None, on_timeout: str | None = None) -> ProcessGroup:
        """Make a group of the same ranks with an order of its own.

        Collective: over this group.

        Args:
            name: The name in messages; numbered if None.
            on_timeout: See ``init``; this group's if None.
        """
        return self._subgroups.clone(name, on_timeout)

    # --- tuning ---

    def tune(
        self,
        device: torch.device,
        sizes: Sequence[int],
        rounds: int,
        source: str,
        told: Callable[[str], object] = lambda line: None,
    ) -> tuning.Table:
        """Measure the fastest all-reduce at each size; this job and later ones use the table.

        Collective: over this group. Waits behind queued operations.

        Args:
            device: This rank's GPU; the CPU for a dry run.
            sizes: Bytes of a tensor.
            rounds: Calls of each algorithm.
            source: Origin of the table, for the record.
            told: Called with a line for each size.
        """
        args = (device, sizes, rounds, source, told)
        table = self._launch(Operation("tune", _tune, args=args))
        self._tables.clear()
        return table

    def tuning_table(self, device: torch.device) -> tuning.Table:
        """Return the table that all ranks of this group use on a type of device: rank 0's.

        Collective: over this group, the first time for a device type and after ``tune``; later
        calls are local.
        """
        # Not the communicator's tables: an operation that is queued may or may not have agreed on
        # one yet, and all ranks must enter the same calls.
        held = self._tables.get(device.type)
        if held is None:
            ask = Operation("tuning_table", lambda comm, *_: tuning.agreed_table(comm, device))
            self.journal.note_own()
            held = self._tables[device.type] = self._launch(ask)
        return held

    # --- state ---

    @property
    def is_single_node(self) -> bool:
        """Return whether all ranks of the group share one node's memory."""
        return self._comm.is_single_node

    @property
    def is_closed(self) -> bool:
        """Return whether ``close`` was called."""
        return self._state.is_closed

    @property
    def issued(self) -> int:
        """Return how many collectives this rank has issued on the group, with those that wait."""
        journal = self._state.journal
        return journal.sequence + len(journal.queue)

    @property
    def timeout_s(self) -> float | None:
        """Return the longest time of an operation until the watchdog reports it; None: no limit."""
        return self._state.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float | None) -> None:
        self._state.timeout_s = seconds(value)

    def where(self, operation: str) -> str:
        """Return the beginning of a message about ``operation``."""
        return self._state.where(operation)

    def peers_of(self, rank: int | None) -> tuple[int, ...]:
        """Return the world ranks that a message to or from ``rank`` needs; all others if None."""
        return self._state.peers_of(rank)

    def fail(self, error: MpidistError) -> None:
        """Raise ``error`` from every later call, and from the call under way when MPI returns."""
        self._state.fail(error)

    def revoke(self) -> bool:
        """Revoke the group's communicator on all ranks (ULFM).

        Returns:
            False without ULFM, or if the group is closed: its communicator may be freed.
        """
        return self._state.revoke()

    def end_with_world(self) -> None:
        """Let this process leave its world while the group is open: its owner closes it then.

        For groups that a library keeps for later use. Any other open group keeps the process in
        its world (``init``).
        """
        self._state.ends_with_world = True

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """End the queued operations, then the group's thread, and give up the communicator.

        Messages that have arrived and were not received are dropped, with a ResourceWarning;
        messages that arrive later are dropped as well, because the communicator is freed after the
        last member has closed the group (``closed_communicators``). A second call has no effect;
        that of another thread returns when the group is closed. A synchronous call under way in
        another thread ends before, unless it takes longer than ``timeout_s``.

        Collective: over the group; no rank waits for another.
        """
        # A callback does not wait for the thread that closes, which waits for the callback; nor
        # does a signal's handler, which interrupts that thread.
        here = threading.get_ident()
        waits = not (self._progress.is_own_thread() or self._closer == here)
        if not self._closing.acquire(blocking=waits):
            return
        self._closer = here
        try:
            if not self._state.is_closed:
                self._close(timeout_s)
        finally:
            self._closer = None
            self._closing.release()

    def _close(self, timeout_s: float) -> None:
        progress, state = self._progress, self._state
        progress.close(timeout_s)
        # A failed group's call may never return.
        is_free = state.failure is None and progress.lock.acquire(timeout=timeout_s)
        try:
            state.close()
        finally:
            if is_free:
                progress.lock.release()
        node_memory.drop(self._comm)
        self._messages.receives.close()
        if state.failure is None and not MPI.Is_finalized():
            tag = self._comm.own_tag(Tag.GROUP_END)
            ended = self._messages.drop_unreceived(tag)
            closed_communicators.add(state.mpi, tag, self._comm.children(), ended)

    def __copy__(self) -> ProcessGroup:
        """Return the group itself: a copy of what holds it is on the same group."""
        return self

    def __deepcopy__(self, memo: object) -> ProcessGroup:
        return self

    def __repr__(self) -> str:
        state = "closed" if self._state.is_closed else "failed" if self._state.failure else "open"
        return f'ProcessGroup("{self.name}", rank {self.rank} of {self.size}, {state})'


def _tune(
    comm: Communicator,
    inputs: Tensors,
    outputs: Tensors,
    device: torch.device,
    sizes: Sequence[int],
    rounds: int,
    source: str,
    log: Callable[[str], object],
) -> tuning.Table:
    comm = comm.blocking()  # as for collectives of device memory
    return tuning_runs.measured_table(
        comm, device, tuning_runs.seconds(comm, device, sizes, rounds, log), source, log
    )
