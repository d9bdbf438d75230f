"""Process group: all calls on one object; the group of all ranks; tuning and closing."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from mpidist.comm import subgroups
from mpidist.comm.algorithms import node_memory, tuning, tuning_runs
from mpidist.comm.collectives import Collectives
from mpidist.comm.execution.group_settings import ABORT, GroupSettings
from mpidist.comm.execution.operation import Operation, Tensors
from mpidist.comm.execution.work import seconds
from mpidist.comm.messages.p2p import PointToPoint
from mpidist.comm.monitored_barrier import MonitoredBarrier
from mpidist.comm.mpi import closed_communicators, creation_barrier, mpi_errors, runtime
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.tags import Tag
from mpidist.comm.objects import Objects
from mpidist.comm.reductions import Reductions
from mpidist.comm.subgroups import ENV_ON_TIMEOUT, Subgroups
from mpidist.comm.watchdog import watchdog
from mpidist.comm.window import Window
from mpidist.comm.window_channel import WindowChannel, channel_of
from mpidist.dynamo import untraced
from mpidist.errors import GroupError

DEFAULT_TIMEOUT_S = 1800.0  # torch's default_pg_timeout
_CLOSE_S = 30.0

_default: ProcessGroup | None = None
_worlds = itertools.count(1)  # numbers of the groups of all ranks


class ProcessGroup(Reductions, Collectives, PointToPoint, Objects, MonitoredBarrier, Subgroups):
    """Ranks that communicate with each other, on a communicator of their own.

    Made by ``init`` (all ranks of the job), ``new_group``, ``split`` or ``clone``.
    """

    def __init__(self, comm: Communicator, settings: GroupSettings) -> None:
        super().__init__(comm, settings)
        self._tables: dict[str, tuning.Table] = {}  # by device type
        self._windows: WindowChannel | None = None  # of the first window with a tensor

    def tune(
        self,
        device: torch.device | None,
        sizes: Sequence[int],
        rounds: int,
        source: str,
        told: Callable[[str], object] = lambda line: None,
        segments: Sequence[tuple[int, int]] = (),
    ) -> tuning.Table:
        """Measure the fastest all-reduce at each size; this job and later ones use the table.

        Collective: over this group. Waits behind queued operations.

        Args:
            device: This rank's GPU; the CPU for a dry run; None for host memory, between nodes that
                have several ranks each.
            sizes: Bytes of a tensor.
            rounds: Calls of each algorithm.
            source: Origin of the table, for the record.
            told: Called with a line for each size.
            segments: The table's segments of the int8 wire (``zero.wire_tuning``).

        Raises:
            ValueError: Host memory, and the group has no choice there: one node, or one rank a
                node.
        """
        if device is None and not self._comm.shares_nodes:
            raise ValueError(
                f"{self.where('tune')} needs several nodes, and several ranks on one of them, to "
                "have a choice in host memory; "
                f"got ranks on nodes {list(self._comm.nodes)}"
            )
        arguments = (device, sizes, rounds, source, told, segments)
        table = self._launch(Operation("tune", _tune, args=arguments))
        self._fast_path.forget()
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

    def window(
        self,
        tensor: torch.Tensor | None = None,
        *,
        size: int | Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Window:
        """Return a window: one-sided access of all ranks to a tensor of each.

        Collective: over this group, with a tensor or a size; else not.

        Args:
            tensor: This rank's tensor; see ``Window.tensor_register``.
            size: In place of a tensor, the elements or shape of one of ``allocate``, filled with
                zeros; sizes may differ by rank, and other ranks may give a tensor.
            dtype: Of that tensor; the same on all ranks.

        Raises:
            TypeError, ValueError, DisagreementError: As ``Window.tensor_register``.
        """
        self._require_usable("window")
        made = Window(self, self._channel_of_windows)
        if size is not None:
            made.register_new(size, dtype, tensor)
        elif tensor is not None:
            made.tensor_register(tensor)
        return made

    def _channel_of_windows(self) -> WindowChannel:
        channel = self._windows
        if channel is None:
            ask = Operation("tensor_register", channel_of, args=(self.where("allocate"),))
            channel = self._windows = self._launch(ask)
        return channel

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """End the queued operations, then the group's thread, and give up the communicator.

        Messages that have arrived and were not received are dropped, with a ResourceWarning;
        messages that arrive later are dropped as well, because the communicator is freed after the
        last member has closed the group (``closed_communicators``). A second call has no effect.

        Collective: over the group; no rank waits for another.
        """
        global _default
        if self._closed:
            return
        self._progress.close(timeout_s)
        with self._revoking:
            self._closed = True
        self._close_fast_path()
        node_memory.drop(self._comm)
        self._receives.close()
        if _default is self:
            _default = None
        if self._failure is None and not MPI.Is_finalized():
            tag = self._comm.own_tag(Tag.GROUP_END)
            ended = self._drop_messages(tag)
            if self._windows is not None:
                self._close_windows(self._windows)
            closed_communicators.add(self._mpi, tag, self._comm.children(), ended)

    def _close_windows(self, channel: WindowChannel) -> None:
        with mpi_errors.death_tolerated():
            for rank, count in enumerate(channel.drain()):
                if count:
                    warnings.warn(
                        f"{self.where('close')}: {count} signals of rank {rank} to a window were "
                        "never waited for",
                        ResourceWarning,
                        3,
                    )
        channel.close()

    def _drop_messages(self, end: int) -> set[int]:
        """Drop what was not received; return the ranks whose message of their close was there.

        Args:
            end: The tag of such a message.
        """
        ended = set()
        with mpi_errors.death_tolerated():
            for source, tag, length in self._receives.drain():
                if tag == end:
                    ended.add(source)
                # Messages with the library's own tags belong to calls that were refused or left.
                elif tag <= self._comm.max_tag:
                    warnings.warn(
                        f"{self.where('close')}: a message from rank {source} (tag {tag}, {length} "
                        "bytes) was never received",
                        ResourceWarning,
                        3,
                    )
        return ended

    def __repr__(self) -> str:
        state = "closed" if self._closed else "failed" if self._failure else "open"
        return f'ProcessGroup("{self.name}", rank {self.rank} of {self.size}, {state})'


for _part in ProcessGroup.__mro__[:-1]:
    untraced(_part)


def init(
    name: str = "world",
    timeout: float | timedelta | None = DEFAULT_TIMEOUT_S,
    debug: bool | None = None,
    on_timeout: str | None = None,
) -> ProcessGroup:
    """Return the group of all ranks of the job; start MPI if it has not started.

    Collective: the first call, over all ranks of the job. Later calls return the same group until
    it is closed.

    Args:
        name: The name in messages.
        timeout: Seconds or a timedelta after which the watchdog reports a collective, and for which
            this call waits for the other ranks, but at least 60 s; None or 0 for no limit.
        debug: Compare the operations of all ranks before each collective; ``MPIDIST_DEBUG=1`` if
            None.
        on_timeout: ``"abort"``: a collective past its timeout, or one that waits for a rank that
            has ended, ends the job with a report. ``"raise"``: every rank of the group raises the
            report, as a ``CommTimeout`` or a ``RankFailureError``; the group has failed, every
            later call on it raises, and the program may save its state and end. All collectives are
            then non-blocking calls of MPI that the thread tests until they have ended. MPI may
            still read and write the tensors of a failed call, so the program must not. A call on
            device memory by pointer blocks in MPI, cannot be left and still ends the job. None:
            ``MPIDIST_ON_TIMEOUT``, else ``"abort"``. Children of the group inherit it.

    Raises:
        LaunchError: The job was started in a way in which MPI cannot connect its ranks.
        CommTimeout: Not all ranks called it in time.
        RankFailureError: A rank's program ended more than 2 s ago.
        DisagreementError: ``on_timeout`` differs between ranks (all ranks).
        ValueError: ``on_timeout`` is unknown.
    """
    global _default
    if _default is None:
        _default = from_world(name, timeout, debug=debug, on_timeout=on_timeout)
    return _default


def from_world(
    name: str,
    timeout: float | timedelta | None,
    key: int | None = None,
    debug: bool | None = None,
    on_timeout: str | None = None,
) -> ProcessGroup:
    """Make a new group of all ranks of the job.

    Collective: over all ranks of the job.

    The arguments are those of ``init``; ``key`` orders the ranks, by their world rank if None.
    """
    limit = seconds(timeout)
    on_timeout = on_timeout or os.environ.get(ENV_ON_TIMEOUT) or ABORT
    creation_barrier.wait_for_world("init", creation_barrier.start_limit(limit))
    world = runtime.world()
    watchdog.start(world)  # before anything is made: it refuses wrong settings
    mpi = world.comm.Split(0, world.rank if key is None else key)
    places = tuple(creation_barrier.ranks_in(mpi, world.comm))
    settings = GroupSettings(name, f"world{next(_worlds)}", places, limit, debug, on_timeout)
    return subgroups.create(ProcessGroup, mpi, settings)


def from_members(
    members: Sequence[int], name: str, timeout: float | timedelta | None
) -> ProcessGroup:
    """Make a group of some ranks of the job.

    Collective: over ``members``. The other ranks take no part, but must start MPI, as all ranks of
    a job must.

    Args:
        members: World ranks, in the new group's order.
        name, timeout: As of ``init``.

    Raises:
        CommTimeout: Not all members called it in time.
        RankFailureError: A member's program ended more than 2 s ago.
        DisagreementError: ``MPIDIST_ON_TIMEOUT`` differs between members (all members).
    """
    limit = seconds(timeout)
    mpi, key = creation_barrier.create_world_group(
        "init", members, creation_barrier.start_limit(limit)
    )
    on_timeout = os.environ.get(ENV_ON_TIMEOUT) or ABORT
    settings = GroupSettings(name, key, tuple(members), limit, None, on_timeout)
    return subgroups.create(ProcessGroup, mpi, settings)


def default() -> ProcessGroup:
    """Return the group that ``init`` made.

    Raises:
        GroupError: ``init`` was not called.
    """
    if _default is None:
        raise GroupError("no process group: call mpidist.comm.init() first, on all ranks")
    return _default


def _tune(
    comm: Communicator,
    inputs: Tensors,
    outputs: Tensors,
    device: torch.device | None,
    sizes: Sequence[int],
    rounds: int,
    source: str,
    log: Callable[[str], object],
    segments: Sequence[tuple[int, int]],
) -> tuning.Table:
    if device is not None:
        comm = comm.blocking()  # as for collectives of device memory
    return tuning_runs.measured_table(
        comm, device, tuning_runs.seconds(comm, device, sizes, rounds, log), source, log, segments
    )
