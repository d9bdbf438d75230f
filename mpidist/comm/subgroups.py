"""Creation of process groups: from some of a group's ranks, by colour, by node, or as a clone.

Every group has a communicator of its own. A child inherits its parent's timeout, debug mode and
``on_timeout`` unless the call gives its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar

from mpidist.comm.execution import arguments
from mpidist.comm.execution.execution import Execution
from mpidist.comm.execution.group_settings import ABORT, RAISE, GroupSettings
from mpidist.comm.execution.operation import Operation, Tensors
from mpidist.comm.execution.work import seconds
from mpidist.comm.mpi import (
    closed_communicators,
    creation_barrier,
    nonblocking,
    revocation,
    runtime,
)
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import Mpi
from mpidist.comm.mpi.tags import Tag
from mpidist.errors import CommTimeout, DisagreementError, GroupError

# "raise" or "abort": for groups that are made from the world without on_timeout
ENV_ON_TIMEOUT = "MPIDIST_ON_TIMEOUT"

G = TypeVar("G")


class Subgroups(Generic[G]):
    """Groups that are made from the ranks of one group.

    Args:
        execution: Execution of the group's operations.
        kind: Class of the groups.
    """

    def __init__(
        self, execution: Execution, kind: Callable[[Communicator, GroupSettings], G]
    ) -> None:
        state = execution.state
        self._execution = execution
        self._kind = kind
        # Numbers of the splits and clones so far. All members count alike, so a child's key is the
        # same on all its ranks.
        self._splits = 0
        self._clones = 0
        self._creation = creation_barrier.CreationBarrier(
            state.mpi, state.comm.own_tag(Tag.GROUP_CREATION), state.world_ranks
        )

    def new_group(
        self,
        ranks: Sequence[int],
        name: str | None = None,
        timeout: float | timedelta | None = None,
        on_timeout: str | None = None,
        key: str | None = None,
    ) -> G | None:
        """See ``ProcessGroup.new_group``."""
        state = self._execution.state
        state.require_usable("new_group")
        where, ranks = state.where("new_group"), list(ranks)
        arguments.ranks(where, ranks, state.size)
        if state.rank not in ranks:
            return None
        if not name:
            name = f"{state.name}/{'-'.join(map(str, ranks[:8]))}{'-...' if len(ranks) > 8 else ''}"
        # Two threads may make two groups of the same ranks, in different orders on different ranks.
        identity = repr((key or name, ranks)).encode()
        digest = hashlib.blake2b(identity, digest_size=8).hexdigest()
        with state.journal.creating("new_group"), state.explained("new_group"):
            number = self._creation.wait(
                where, digest, ranks, lambda missing: state.raise_failure()
            )
            mpi = creation_barrier.create_group(state.mpi, ranks, identity)
        members = tuple([state.world_ranks[rank] for rank in ranks])
        child_key = f"{state.key}/{digest}#{number}"
        return self._child(mpi, members, name, child_key, timeout, on_timeout)

    def split(
        self,
        color: int | None,
        key: int = 0,
        timeout: float | timedelta | None = None,
        on_timeout: str | None = None,
    ) -> G | None:
        """See ``ProcessGroup.split``."""
        state = self._execution.state
        return self._split(color, key, timeout, f"{state.name}/color{color}", on_timeout)

    def split_by_node(self, timeout: float | timedelta | None = None) -> G:
        """See ``ProcessGroup.split_by_node``."""
        state = self._execution.state
        node = state.comm.nodes[state.rank]
        child = self._split(node, state.rank, timeout, f"{state.name}/node{node}", None)
        assert child is not None
        return child

    def shrink(
        self,
        exclude: Sequence[int],
        abort: bool = False,
        name: str | None = None,
        timeout: float | timedelta | None = None,
        on_timeout: str | None = None,
    ) -> G:
        """See ``ProcessGroup.shrink``."""
        state = self._execution.state
        where = state.where("shrink")
        if state.is_closed:
            raise GroupError(f"{where} was called on a closed group")
        gone = list(exclude)
        arguments.ranks(where, gone, state.size)
        if not gone or len(gone) == state.size:
            raise ValueError(f"{where} must exclude some ranks, and not all; got {gone}")
        if state.rank in gone:
            raise ValueError(
                f"{where} is called by the ranks that remain; this one is excluded ({gone})"
            )
        if abort:
            state.fail(GroupError(f"{where} was called with abort=True"))
            state.revoke()
        elif state.failure is None and (pending := self._execution.progress.pending):
            raise GroupError(
                f"{where} with {pending} operations under way or queued: wait for them, or give "
                "abort=True, which fails them"
            )
        members = [
            world_rank for rank, world_rank in enumerate(state.world_ranks) if rank not in gone
        ]
        limit = state.timeout_s if timeout is None else seconds(timeout)
        try:
            return self._surviving(
                f"shrink of {state.key}", members, name or f"{state.name}/shrunk", limit, on_timeout
            )
        except CommTimeout as error:
            raise CommTimeout(
                f"{where}: {error}; all ranks that remain must exclude the same ranks, here {gone}"
            ) from error

    def regroup(
        self,
        world_ranks: Sequence[int],
        key: str,
        timeout: float | timedelta | None = None,
    ) -> G:
        """See ``ProcessGroup.regroup``."""
        state = self._execution.state
        where, members, world = state.where("regroup"), list(world_ranks), runtime.world()
        if state.is_closed:
            raise GroupError(f"{where} was called on a closed group")
        arguments.ranks(where, members, world.size)
        if world.rank not in members:
            raise ValueError(
                f"{where} is called by the ranks of the new group; this one, rank {world.rank} of "
                f"the job, is not among {members}"
            )
        if state.failure is None and (pending := self._execution.progress.pending):
            raise GroupError(
                f"{where} with {pending} operations under way or queued: wait for them first"
            )
        limit = state.timeout_s if timeout is None else seconds(timeout)
        try:
            return self._surviving(f"regroup {key}", members, state.name, limit, None)
        except CommTimeout as error:
            raise CommTimeout(
                f"{where}: {error}; all must give the same ranks and key, here {members} and {key}"
            ) from error

    def _surviving(
        self,
        operation: str,
        members: Sequence[int],
        name: str,
        limit: float | None,
        on_timeout: str | None,
    ) -> G:
        """Make a group of some ranks of the job, of which others may be dead."""
        state = self._execution.state
        mpi, key = creation_barrier.create_world_group(operation, members, limit, survives=True)
        settings = GroupSettings(
            name,
            key,
            tuple(members),
            limit,
            self._execution.is_debug,
            on_timeout or state.on_timeout,
        )
        return create(self._kind, mpi, settings)

    def clone(self, name: str | None = None, on_timeout: str | None = None) -> G:
        """See ``ProcessGroup.clone``."""
        state = self._execution.state
        # Numbered in the group, not in the process: the watchdogs of all ranks need one name.
        self._clones += 1
        child = self._split(
            0, state.rank, None, name or f"{state.name}/clone{self._clones}", on_timeout
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
    ) -> G | None:
        state = self._execution.state
        state.require_usable("split")
        if color is not None and (
            isinstance(color, bool) or not hasattr(color, "__index__") or color < 0
        ):
            raise ValueError(
                f"{state.where('split')} needs a color of None or at least 0; got {color!r}"
            )
        self._splits += 1
        mpi_color = MPI.UNDEFINED if color is None else color
        mpi = self._execution.launch(Operation("split", _split, args=(mpi_color, key)))
        if mpi == MPI.COMM_NULL:
            return None
        child_key = f"{state.key}/split{self._splits}.{color}"
        places = creation_barrier.ranks_in(mpi, state.mpi)
        members = tuple([state.world_ranks[place] for place in places])
        return self._child(mpi, members, name, child_key, timeout, on_timeout)

    def _child(
        self,
        mpi: Mpi,
        world_ranks: tuple[int, ...],
        name: str,
        key: str,
        timeout: float | timedelta | None,
        on_timeout: str | None,
    ) -> G:
        state = self._execution.state
        limit = state.timeout_s if timeout is None else seconds(timeout)
        settings = GroupSettings(
            name, key, world_ranks, limit, self._execution.is_debug, on_timeout or state.on_timeout
        )
        return create(self._kind, mpi, settings)


def create(
    kind: Callable[[Communicator, GroupSettings], G], mpi: Mpi, settings: GroupSettings
) -> G:
    """Make a group on a new communicator.

    Collective: over the communicator.

    Raises:
        DisagreementError: ``on_timeout`` differs between ranks (all ranks).
        ValueError: ``on_timeout`` is unknown.
    """
    mpi.Set_errhandler(MPI.ERRORS_RETURN)
    world = runtime.world()
    comm = Communicator(
        mpi, world.nodes_of(settings.world_ranks), world.highest_tag, world.adds_in_rank_order
    )
    # Nobody else revokes a communicator that is not a group's yet.
    with revocation.on_error(mpi):
        _require_same_end(mpi, settings.name, settings.on_timeout)
    return kind(comm, settings)


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
