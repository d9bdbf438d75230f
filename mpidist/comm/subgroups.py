"""Creation of process groups: from some of a group's ranks, by colour, by node, or as a clone.

Every group has a communicator of its own. A child inherits its parent's timeout, debug mode and
``on_timeout`` unless the call gives its own.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

from mpidist.comm.algorithms import tuning
from mpidist.comm.execution import arguments
from mpidist.comm.execution.execution import Execution
from mpidist.comm.execution.group_settings import ABORT, RAISE, GroupSettings
from mpidist.comm.execution.operation import Operation, Tensors
from mpidist.comm.execution.work import seconds
from mpidist.comm.mpi import closed_communicators, creation_barrier, nonblocking, runtime
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import Mpi
from mpidist.comm.mpi.tags import Tag
from mpidist.comm.watchdog import watchdog
from mpidist.errors import CommTimeout, DisagreementError, GroupError

# "raise" or "abort": for groups that are made from the world without on_timeout
ENV_ON_TIMEOUT = "MPIDIST_ON_TIMEOUT"

G = TypeVar("G", bound="Subgroups")


class Subgroups(Execution):
    """The calls of a process group that make other groups."""

    # Numbers of the splits and clones so far. All members count alike, so a child's key is the same
    # on all its ranks.
    _splits = 0
    _clones = 0

    def __init__(self, comm: Communicator, settings: GroupSettings) -> None:
        super().__init__(comm, settings)
        self._creations: Counter[str] = Counter()  # by name and ranks
        self._creation = creation_barrier.CreationBarrier(
            self._mpi, self._comm.own_tag(Tag.GROUP_CREATION), self.world_ranks
        )

    def new_group(
        self: G,
        ranks: Sequence[int],
        name: str | None = None,
        timeout: float | timedelta | None = None,
        on_timeout: str | None = None,
    ) -> G | None:
        """Make a group of some of this group's ranks.

        Collective: over ``ranks`` alone; others may call it too, and get None. Members must agree
        on the order of such calls.

        Args:
            ranks: Distinct ranks of this group, in the new group's order.
            name: The name in messages; derived from the ranks if None.
            timeout: Seconds or a timedelta, 0 for no limit; this group's if None.
            on_timeout: See ``init``; this group's if None.

        Blocks: until all of ``ranks`` have called it, at most this group's timeout.

        Raises:
            ValueError: Ranks repeated or out of range.
            CommTimeout: Not all members called it in time (members that wait); the watchdog has
                printed what each rank does, and this group has failed.
            RankFailureError: A member died, or its program ended more than 2 s ago
                (members that wait).
            DisagreementError: ``on_timeout`` differs between the members (all members).
        """
        self._require_usable("new_group")
        where, ranks = self.where("new_group"), list(ranks)
        arguments.ranks(where, ranks, self.size)
        if self.rank not in ranks:
            return None
        if not name:
            name = f"{self.name}/{'-'.join(map(str, ranks[:8]))}{'-...' if len(ranks) > 8 else ''}"
        # The identity includes the name, because two threads may make two groups of the same ranks,
        # in different orders on different ranks.
        identity = repr((name, ranks)).encode()
        digest = hashlib.blake2b(identity, digest_size=8).hexdigest()
        self._creations[digest] += 1
        creation_key = f"{digest}#{self._creations[digest]}"
        with self.journal.creating("new_group"), self._explained("new_group"):
            self._creation.wait(where, creation_key, ranks, lambda missing: self._raise_failure())
            mpi = creation_barrier.create_group(self._mpi, ranks, identity)
        members = tuple([self.world_ranks[rank] for rank in ranks])
        return self._child(mpi, members, name, f"{self.key}/{creation_key}", timeout, on_timeout)

    def split(
        self: G,
        color: int | None,
        key: int = 0,
        timeout: float | timedelta | None = None,
        on_timeout: str | None = None,
    ) -> G | None:
        """Divide the group: the ranks of each ``color`` form a new group.

        Collective: over this group. Waits behind queued operations.

        Args:
            color: At least 0, the same for the ranks of one new group; None to join none.
            key: Orders the ranks of the new group; ranks of equal keys keep their order.
            timeout: Seconds or a timedelta, 0 for no limit; this group's if None.
            on_timeout: See ``init``; this group's if None.
        """
        return self._split(color, key, timeout, f"{self.name}/color{color}", on_timeout)

    def split_by_node(self: G, timeout: float | timedelta | None = None) -> G:
        """Divide the group into one for each node; its ranks share the node's memory.

        Collective: over this group. Waits behind queued operations.

        Source: MPI-4.1 §7.4.2, MPI_COMM_TYPE_SHARED.
        """
        node = self._comm.nodes[self.rank]
        child = self._split(node, self.rank, timeout, f"{self.name}/node{node}", None)
        assert child is not None
        return child

    def shrink(
        self: G,
        exclude: Sequence[int],
        abort: bool = False,
        name: str | None = None,
        timeout: float | timedelta | None = None,
        on_timeout: str | None = None,
    ) -> G:
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
        where = self.where("shrink")
        if self.is_closed:
            raise GroupError(f"{where} was called on a closed group")
        gone = list(exclude)
        arguments.ranks(where, gone, self.size)
        if not gone or len(gone) == self.size:
            raise ValueError(f"{where} must exclude some ranks, and not all; got {gone}")
        if self.rank in gone:
            raise ValueError(
                f"{where} is called by the ranks that remain; this one is excluded ({gone})"
            )
        if abort:
            self.fail(GroupError(f"{where} was called with abort=True"))
            self.revoke()
        elif self._failure is None and (pending := self._progress.pending):
            raise GroupError(
                f"{where} with {pending} operations under way or queued: wait for them, or give "
                "abort=True, which fails them"
            )
        members = [
            world_rank for rank, world_rank in enumerate(self.world_ranks) if rank not in gone
        ]
        limit = self.timeout_s if timeout is None else seconds(timeout)
        try:
            return self._surviving(
                f"shrink of {self.key}", members, name or f"{self.name}/shrunk", limit, on_timeout
            )
        except CommTimeout as error:
            raise CommTimeout(
                f"{where}: {error}; all ranks that remain must exclude the same ranks, here {gone}"
            ) from error

    def regroup(
        self: G,
        world_ranks: Sequence[int],
        key: str,
        timeout: float | timedelta | None = None,
    ) -> G:
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
        where, members, world = self.where("regroup"), list(world_ranks), runtime.world()
        if self.is_closed:
            raise GroupError(f"{where} was called on a closed group")
        arguments.ranks(where, members, world.size)
        if world.rank not in members:
            raise ValueError(
                f"{where} is called by the ranks of the new group; this one, rank {world.rank} of "
                f"the job, is not among {members}"
            )
        if self._failure is None and (pending := self._progress.pending):
            raise GroupError(
                f"{where} with {pending} operations under way or queued: wait for them first"
            )
        limit = self.timeout_s if timeout is None else seconds(timeout)
        try:
            return self._surviving(f"regroup {key}", members, self.name, limit, None)
        except CommTimeout as error:
            raise CommTimeout(
                f"{where}: {error}; all must give the same ranks and key, here {members} and {key}"
            ) from error

    def _surviving(
        self: G,
        operation: str,
        members: Sequence[int],
        name: str,
        limit: float | None,
        on_timeout: str | None,
    ) -> G:
        """Make a group of some ranks of the job, of which others may be dead."""
        mpi, key = creation_barrier.create_world_group(operation, members, limit, survives=True)
        settings = GroupSettings(
            name, key, tuple(members), limit, self._debug, on_timeout or self.on_timeout
        )
        return create(type(self), mpi, settings)

    def clone(self: G, name: str | None = None, on_timeout: str | None = None) -> G:
        """Make a group of the same ranks with an order of its own.

        Collective: over this group.

        Args:
            name: The name in messages; numbered if None.
            on_timeout: See ``init``; this group's if None.
        """
        # Numbered in the group, not in the process: the watchdogs of all ranks need one name.
        self._clones += 1
        child = self._split(
            0, self.rank, None, name or f"{self.name}/clone{self._clones}", on_timeout
        )
        assert child is not None
        return child

    def _split(
        self: G,
        color: int | None,
        key: int,
        timeout: float | timedelta | None,
        name: str,
        on_timeout: str | None,
    ) -> G | None:
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
        child_key = f"{self.key}/split{self._splits}.{color}"
        places = creation_barrier.ranks_in(mpi, self._mpi)
        members = tuple([self.world_ranks[place] for place in places])
        return self._child(mpi, members, name, child_key, timeout, on_timeout)

    def _child(
        self: G,
        mpi: Mpi,
        world_ranks: tuple[int, ...],
        name: str,
        key: str,
        timeout: float | timedelta | None,
        on_timeout: str | None,
    ) -> G:
        limit = self.timeout_s if timeout is None else seconds(timeout)
        settings = GroupSettings(
            name, key, world_ranks, limit, self._debug, on_timeout or self.on_timeout
        )
        return create(type(self), mpi, settings)


def create(kind: type[G], mpi: Mpi, settings: GroupSettings) -> G:
    """Make a group on a new communicator; the watchdog watches the group.

    Collective: over the communicator.

    Raises:
        DisagreementError: ``on_timeout`` differs between ranks (all ranks).
        ValueError: ``on_timeout`` is unknown.
    """
    mpi.Set_errhandler(MPI.ERRORS_RETURN)
    _require_same_end(mpi, settings.name, settings.on_timeout)
    world = runtime.world()
    comm = Communicator(mpi, world.nodes_of(settings.world_ranks), world.highest_tag)
    if comm.shares_nodes:
        # Collective, so at creation: later an all-reduce reads the table without communication.
        tuning.agreed_table(comm, None)
    group = kind(comm, settings)
    watchdog.watch(group)
    return group


def _require_same_end(mpi: Mpi, name: str, on_timeout: str) -> None:
    """Compare ``on_timeout`` of all ranks: blocking and non-blocking collectives do not match.

    Collective: over a new communicator, which is given up if this raises.
    """
    codes = {ABORT: 0, RAISE: 1}
    every = bytearray(mpi.Get_size())
    mpi.Allgather((bytes([codes.get(on_timeout, 2)]), 1, MPI.BYTE), (every, 1, MPI.BYTE))
    if max(every) == 2 or len(set(every)) > 1:
        closed_communicators.add(mpi, 0)
        words = [*codes, "another word"]
        values = ", ".join(
            f"{words[code]} on rank {every.index(code)}" for code in sorted(set(every))
        )
        if on_timeout not in codes:
            raise ValueError(
                f'group "{name}": on_timeout (or {ENV_ON_TIMEOUT}) must be "abort" or "raise"; '
                f"got {on_timeout!r}"
            )
        raise DisagreementError(
            f'group "{name}": on_timeout (or {ENV_ON_TIMEOUT}) must be the same on all ranks; it '
            f"is {values}"
        )


def _split(comm: Communicator, inputs: Tensors, outputs: Tensors, color: int, key: int) -> Any:
    if isinstance(comm.mpi, nonblocking.MpiCalls) and comm.mpi.is_abandonable:
        # A wait for a missing rank can be abandoned here, and not in MPI_Comm_split.
        comm.mpi.Barrier()
    return comm.mpi.Split(color, key)
