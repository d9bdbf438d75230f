"""The process group: its making from the world or from another group, its splitting and its end."""

from __future__ import annotations

import hashlib
import itertools
import os
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from mpidist.comm import arguments, watchdog
from mpidist.comm.algorithms import tuning, tuning_runs
from mpidist.comm.collectives import Collectives
from mpidist.comm.group_failure import ABORT, RAISE
from mpidist.comm.monitored_barrier import MonitoredBarrier
from mpidist.comm.mpi import creation_barrier, mpi_errors, nonblocking, runtime
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.tags import Tag
from mpidist.comm.objects import Objects
from mpidist.comm.operation import Operation, Tensors
from mpidist.comm.p2p import PointToPoint
from mpidist.comm.work import seconds
from mpidist.dynamo import untraced
from mpidist.errors import DisagreementError, GroupError

DEFAULT_TIMEOUT_S = 1800.0  # torch's default_pg_timeout
_CLOSE_S = 30.0  # how long close() lets asynchronous operations end
_HIGHEST_CREATE_TAG = 32_000  # MPI guarantees tags up to 32767
# "raise" or "abort": for groups that are made from the world without on_timeout
_ENV_ON_TIMEOUT = "MPIDIST_ON_TIMEOUT"

_default: ProcessGroup | None = None
_worlds = itertools.count(1)  # groups of all ranks so far


class ProcessGroup(Collectives, PointToPoint, Objects, MonitoredBarrier):
    """Ranks that communicate with each other, on a communicator of their own.

    Make one with ``init`` (all ranks of the job), ``new_group``, ``split`` or ``clone``.
    """

    # How often each kind of child was made. All members count alike, so a child's key is the same
    # for all its ranks.
    _splits = 0
    _clones = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._made: Counter[str] = Counter()
        self._meeting = creation_barrier.Meeting(
            self._mpi, self._comm.own_tag(Tag.GROUP_CREATION), self.world_ranks
        )

    def new_group(
        self,
        ranks: Sequence[int],
        name: str | None = None,
        timeout: float | timedelta | None = None,
        on_timeout: str | None = None,
    ) -> ProcessGroup | None:
        """Make a group of some of this group's ranks.

        Collective: over ``ranks`` alone; others may call it too, and get None. Members must agree
        on the order of such calls.

        Args:
            ranks: Distinct ranks of this group, in the new group's order.
            name: For messages; made up if None.
            timeout: Seconds or a timedelta, 0 for no limit; this group's if None.
            on_timeout: See ``init``; this group's if None.

        Blocks: until all of ``ranks`` have called it, at most this group's timeout.

        Raises:
            ValueError: Ranks repeated or out of range.
            CommTimeout: Not all members came in time (members that wait); the watchdog has printed
                what each rank does, and this group has failed.
            RankFailureError: A member died, or came to the end of its program more than 2 s ago
                (members that wait).
            DisagreementError: ``on_timeout`` differs between the members (all members).
        """
        self._require_usable("new_group")
        where = self.where("new_group")
        ranks = list(ranks)
        if not ranks or len(set(ranks)) != len(ranks):
            raise ValueError(f"{where} needs at least one rank and none twice; got {ranks}")
        for rank in ranks:
            arguments.rank(where, rank, "each of ranks", self.size)
        if self.rank not in ranks:
            return None
        name = (
            name or f"{self.name}/{'-'.join(map(str, ranks[:8]))}{'-...' if len(ranks) > 8 else ''}"
        )
        members = self._mpi.Get_group().Incl(ranks)
        # By its name as well: two threads may make two groups of the same ranks, in either order.
        kind = hashlib.blake2b(repr((name, ranks)).encode(), digest_size=8).hexdigest()
        self._made[kind] += 1
        made = f"{kind}#{self._made[kind]}"
        creation = self.journal.enter_creation("new_group")
        try:
            with self._explained("new_group"):
                self._meeting.meet(where, made, ranks, lambda missing: self._raise_failure())
                # The tag keeps two groups apart that two threads make at once.
                mpi = self._mpi.Create_group(
                    members, zlib.crc32(repr((name, ranks)).encode()) % _HIGHEST_CREATE_TAG
                )
        finally:
            self.journal.leave_creation(creation)
        members.Free()
        return self._child(mpi, name, f"{self.key}/{made}", timeout, on_timeout)

    def split(
        self,
        color: int | None,
        key: int = 0,
        timeout: float | timedelta | None = None,
        on_timeout: str | None = None,
    ) -> ProcessGroup | None:
        """Divide the group: ranks of one ``color`` (≥ 0) form a new one, ordered by ``key``, then by rank; None joins none.

        Collective: over this group. Waits behind what is queued.

        Args:
            color: The same for the ranks of one new group.
            key: Orders its ranks.
            timeout: Seconds or a timedelta, 0 for no limit; this group's if None.
            on_timeout: See ``init``; this group's if None.
        """
        return self._split(color, key, timeout, f"{self.name}/color{color}", on_timeout)

    def split_by_node(self, timeout: float | timedelta | None = None) -> ProcessGroup:
        """Divide the group into one for each node; its ranks share the node's memory.

        Collective: over this group. Waits behind what is queued.

        Source: MPI-4.1 §7.4.2, MPI_COMM_TYPE_SHARED.
        """
        node = self._comm.nodes[self.rank]
        child = self._split(node, self.rank, timeout, f"{self.name}/node{node}", None)
        assert child is not None
        return child

    def clone(self, name: str | None = None, on_timeout: str | None = None) -> ProcessGroup:
        """Make a group of the same ranks with an order of its own.

        Collective: over this group.

        Args:
            name: For messages; made up if None.
            on_timeout: See ``init``; this group's if None.
        """
        # Numbered by the group, not the process: the watchdogs of all ranks must know it by one
        # name.
        self._clones += 1
        child = self._split(
            0, self.rank, None, name or f"{self.name}/clone{self._clones}", on_timeout
        )
        assert child is not None
        return child

    def _split(
        self,
        color: int | None,
        key: int,
        timeout: float | timedelta | None,
        name: str,
        on_timeout: str | None,
    ) -> ProcessGroup | None:
        self._require_usable("split")
        if color is not None and (
            isinstance(color, bool) or not hasattr(color, "__index__") or color < 0
        ):
            raise ValueError(
                f"{self.where('split')} needs a color of None or at least 0; got {color!r}"
            )
        self._splits += 1
        mpi_color = MPI.UNDEFINED if color is None else color
        mpi = self._launch(Operation("split", _split, args=(mpi_color, key)))
        if mpi == MPI.COMM_NULL:
            return None
        return self._child(
            mpi, name, f"{self.key}/split{self._splits}.{color}", timeout, on_timeout
        )

    def tune(
        self,
        device: torch.device | None,
        sizes: Sequence[int],
        rounds: int,
        source: str,
        told: Callable[[str], Any] = lambda line: None,
    ) -> tuning.Table:
        """Measure which all-reduce is the fastest at each size; this job and later ones then use the table.

        Collective: over this group. Waits behind what is queued.

        Args:
            device: This rank's GPU; the CPU for a dry run; None for host memory, between nodes that
                have several ranks each.
            sizes: Bytes of a tensor.
            rounds: Calls of each algorithm.
            source: Who says so, for the record.
            told: Gets a line for each size.

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
        table = self._launch(Operation("tune", _tune, args=(device, sizes, rounds, source, told)))
        self._fast_path.forget()
        return table

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """End the group: let queued operations end, then free its thread and communicator. May be called twice.

        Messages that have arrived and that no rank received are dropped, with a ResourceWarning.

        Collective: over the group, because MPI frees a communicator together.
        """
        global _default
        if self._closed:
            return
        self._progress.close(timeout_s)
        self._closed = True
        self._close_fast_path()
        self._receives.close()
        if _default is self:
            _default = None
        if self._failure is None and not MPI.Is_finalized():
            self._drop_messages()
            for mpi in (*self._comm.children(), self._mpi):
                mpi.Free()

    def _drop_messages(self) -> None:
        with mpi_errors.death_tolerated():
            for source, tag, length in self._receives.drain():
                # the library's own are of calls that were refused or given up
                if tag <= self._comm.max_tag:
                    warnings.warn(
                        f"{self.where('close')}: a message from rank {source} (tag {tag}, {length} "
                        "bytes) was never received",
                        ResourceWarning,
                        3,
                    )

    def _child(
        self,
        mpi: Any,
        name: str,
        key: str,
        timeout: float | timedelta | None,
        on_timeout: str | None,
    ) -> ProcessGroup:
        places = MPI.Group.Translate_ranks(
            mpi.Get_group(), list(range(mpi.Get_size())), self._mpi.Get_group()
        )
        world_ranks = [self.world_ranks[place] for place in places]
        limit = self.timeout_s if timeout is None else seconds(timeout)
        return _make(mpi, name, key, world_ranks, limit, self._debug, on_timeout or self.on_timeout)

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
    """Return the group of all ranks of the job, starting MPI if nobody has.

    Collective: the first call, over all ranks of the job. Later calls return the same group until
    it is closed.

    Args:
        name: For messages.
        timeout: Seconds or a timedelta after which the watchdog reports a collective, and how long
            this call waits for the other ranks, but at least 60 s; None or 0 for no limit.
        debug: Compare what ranks are about to do before each collective; ``MPIDIST_DEBUG=1`` if
            None.
        on_timeout: ``"abort"``: a collective past its timeout, or one that waits for a rank that
            has ended, ends the job with a report. ``"raise"``: on every rank of the group the
            caller gets the report, as a ``CommTimeout`` or a ``RankFailureError``; the group has
            failed, every later call on it raises, and the program may save its state and end. All
            collectives are then non-blocking calls of MPI that the thread tests until they have
            ended. What was given to a failed call stays in MPI's hands: neither read nor write
            these tensors. A call on device memory that MPI takes directly blocks in MPI, cannot be
            left and still ends the job. None: ``MPIDIST_ON_TIMEOUT``, else ``"abort"``. Children of
            the group inherit it.

    Raises:
        LaunchError: The job was started in a way in which MPI cannot connect its ranks.
        CommTimeout: Not all ranks came in time.
        RankFailureError: A rank came to the end of its program more than 2 s ago.
        DisagreementError: ``on_timeout`` differs between ranks (all ranks).
        ValueError: ``on_timeout`` is neither.
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
    """Make a new group of all ranks of the job, ordered by ``key`` (their world rank if None); the rest as for ``init``.

    Collective: over all ranks of the job.
    """
    limit = seconds(timeout)
    on_timeout = on_timeout or os.environ.get(_ENV_ON_TIMEOUT) or ABORT
    creation_barrier.of_world("init", creation_barrier.start_limit(limit))
    world = runtime.world()
    mpi = world.comm.Split(0, world.rank if key is None else key)
    places = MPI.Group.Translate_ranks(
        mpi.Get_group(), list(range(mpi.Get_size())), world.comm.Get_group()
    )
    return _make(mpi, name, f"world{next(_worlds)}", places, limit, debug, on_timeout)


def default() -> ProcessGroup:
    """Return the group that ``init`` made.

    Raises:
        GroupError: Nobody called ``init``.
    """
    if _default is None:
        raise GroupError("no process group: call mpidist.comm.init() first, on all ranks")
    return _default


def _make(
    mpi: Any,
    name: str,
    key: str,
    world_ranks: Sequence[int],
    timeout_s: float | None,
    debug: bool | None,
    on_timeout: str,
) -> ProcessGroup:
    mpi.Set_errhandler(MPI.ERRORS_RETURN)
    _require_one_end(mpi, name, on_timeout)
    world = runtime.world()
    comm = Communicator(mpi, world.nodes_of(world_ranks), world.highest_tag)
    if comm.shares_nodes:
        # now, while all ranks are here: an all-reduce asks for it on each rank by itself
        tuning.agreed_table(comm, None)
    group = ProcessGroup(comm, name, key, world_ranks, timeout_s, debug, on_timeout)
    watchdog.watch(group)
    return group


def _require_one_end(mpi: Any, name: str, on_timeout: str) -> None:
    """Compare what ranks do on a timeout: blocking and non-blocking collectives do not match.

    Collective: over a new communicator, which is freed if this raises.
    """
    codes = {ABORT: 0, RAISE: 1}
    every = bytearray(mpi.Get_size())
    mpi.Allgather((bytes([codes.get(on_timeout, 2)]), 1, MPI.BYTE), (every, 1, MPI.BYTE))
    if max(every) == 2 or len(set(every)) > 1:
        mpi.Free()
        words = [*codes, "another word"]
        told = ", ".join(
            f"{words[code]} on rank {every.index(code)}" for code in sorted(set(every))
        )
        if on_timeout not in codes:
            raise ValueError(
                f'group "{name}": on_timeout (or {_ENV_ON_TIMEOUT}) must be "abort" or "raise"; '
                f"got {on_timeout!r}"
            )
        raise DisagreementError(
            f'group "{name}": on_timeout (or {_ENV_ON_TIMEOUT}) must be the same on all ranks; it '
            f"is {told}"
        )


def _tune(
    comm: Communicator,
    inputs: Tensors,
    outputs: Tensors,
    device: torch.device | None,
    sizes: Sequence[int],
    rounds: int,
    source: str,
    told: Callable[[str], Any],
) -> tuning.Table:
    if device is not None:
        comm = comm.blocking()  # as collectives of device memory have it
    return tuning_runs.measured_table(
        comm, device, tuning_runs.seconds(comm, device, sizes, rounds, told), source, told
    )


def _split(comm: Communicator, inputs: Tensors, outputs: Tensors, color: int, key: int) -> Any:
    if isinstance(comm.mpi, nonblocking.MpiCalls) and comm.mpi.is_abandonable:
        comm.mpi.Barrier()  # it can be abandoned while a rank is missing; the call below cannot
    return comm.mpi.Split(color, key)
