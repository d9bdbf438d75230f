"""torch's reconfigure API: a group of mpidist changes its members, among the ranks of the job.

Every rank has a handle, which the program brings to the others by ways of its own. The ranks whose
handles are given make a new communicator; the group's object stays, and so does its ``Backend``,
because torch registers one Backend a group and has no way to exchange it. Ranks that were left out
keep their object for a later call. torch caches rank and size in C++; both are overridden here.

Source: torch/csrc/distributed/c10d/Backend.hpp (ReconfigureOptions), py/PyProcessGroup.hpp.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store, Work

from mpidist.c10d.calls import Calls
from mpidist.c10d.native import native_of
from mpidist.c10d.process_group import TorchProcessGroup
from mpidist.c10d.work import ENDED
from mpidist.comm import consistency
from mpidist.comm.group import ProcessGroup
from mpidist.dynamo import untraced

_SCHEME = "mpidist"
# torch's tables of groups.
_torch: Any = distributed_c10d._world


class Handles:
    """Handles of the processes that a group can have: its origin, and the rank in the job.

    Args:
        origin: Identifies the job and the group.
    """

    def __init__(self, origin: str) -> None:
        self._origin = origin

    def of(self, world_rank: int) -> str:
        """Return the handle of one process."""
        return f"{_SCHEME}:{self._origin}:{world_rank}"

    def members(self, where: str, handles: Sequence[str] | set[str], own: str) -> list[int]:
        """Return the world ranks of handles.

        Args:
            where: The beginning of a message.
            handles: In a list, whose order stays, or in a set.
            own: The handle of this process, for messages.

        Raises:
            ValueError: One is no handle, or of another job or group.
        """
        members = []
        for handle in handles:
            scheme, _, rest = handle.partition(":")
            origin, _, rank = rest.rpartition(":")
            if scheme != _SCHEME or not rank.isdecimal():
                raise ValueError(f"{where} needs handles of mpidist; got {handle!r}")
            if origin != self._origin:
                raise ValueError(
                    f"{where} got the handle of another group, or of a process of another job of "
                    f"MPI, with which this one cannot communicate: {handle!r}; this process has "
                    f"{own!r}"
                )
            members.append(int(rank))
        return sorted(members) if isinstance(handles, (set, frozenset)) else members


@untraced
class ReconfigurableGroup(TorchProcessGroup):
    """A torch group on MPI that ``_reconfigure`` gives other members.

    Args:
        native: The native group.
        store: The store that torch created the group with.
        name: torch's name of the group.
        origin: Identifies the job and the first group of which this one is a successor; the same on
            all ranks.

    Attributes:
        origin: As given.
        supports_reconfigure: True.
    """

    supports_reconfigure = True

    def __init__(self, native: ProcessGroup, store: Store, name: str, origin: str) -> None:
        super().__init__(native, store, name)
        self.origin = self.backend.origin = origin
        self._handles = Handles(origin)
        self._uuids: set[int] = set()

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self.native.rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self.native.size

    # The names that C++ calls.
    getRank = rank
    getSize = size

    def get_reconfigure_handle(self) -> str:
        """Return this process's handle, which its peers give to ``reconfigure``. Not collective."""
        return self._handles.of(self.native.world_ranks[self.native.rank])

    def reconfigure(self, opts: Any) -> Work:
        """Give the group other members; see ``torch.distributed._reconfigure``.

        Where the default group gets other members, all other groups of this process are destroyed,
        as by ``shrink_group``: the ranks that torch counts them by are others. Modules that hold
        the group's size (DDP) are made anew.

        Collective: over the processes whose handles are given, which must agree on handles and
        uuid.

        Args:
            opts: A ``ReconfigureOptions``: ``uuid``, fresh for each call; ``handles``, in a list by
                rank, or in a set, whose members are ordered by the ranks of the job; ``timeout``,
                or None for the group's.

        Blocks: until all of them have called it, at most the timeout; the work returned has ended.

        Raises:
            ValueError: A handle of another job, group or backend, or twice, or none of this
                process; a uuid that this group has had; hints, of which there are none.
            GroupError, CommTimeout, RankFailureError: See ``ProcessGroup.regroup``; the group stays
                as it is.
        """
        where = self.native.where("reconfigure")
        members = self._handles.members(where, opts.handles, self.get_reconfigure_handle())
        if opts.uuid in self._uuids:
            raise ValueError(f"{where} needs a fresh uuid; this group has had {opts.uuid}")
        if opts.hints:
            raise ValueError(f"{where} takes no hints; got {dict(opts.hints)}")
        before = self.native
        default: Any = native_of(_torch.default_pg)
        if default is not before and not set(members) <= set(default.world_ranks):
            raise ValueError(
                f"{where} of a sub-group needs ranks of the default group, which are ranks "
                f"{list(default.world_ranks)} of the job; got {members}"
            )
        native = before.regroup(members, f"{self.origin} {opts.uuid}", opts.timeout)
        self._uuids.add(opts.uuid)
        self.native, self.calls = native, Calls(native)
        self.backend.serve(self.calls)
        _renumber(self, before)
        before.close()
        return ENDED


def origin_of(native: ProcessGroup, parent: str | None) -> str:
    """Return a text that identifies a new group among those of all jobs.

    Collective: over the group.

    Args:
        native: The native group.
        parent: The origin of the default group; None for that group itself.
    """
    if parent is not None:
        return f"{parent}/{native.key}"
    job: str = native.all_gather_object(secrets.token_hex(8))[0]
    return job


def _renumber(group: ReconfigurableGroup, before: ProcessGroup) -> None:
    """Bring torch's tables in line with a group's new members.

    Collective: over the new group.
    """
    native = group.native
    if group is not _torch.default_pg:
        default: Any = native_of(_torch.default_pg)
        _torch.pg_group_ranks[group] = {
            default.world_ranks.index(world_rank): rank
            for rank, world_rank in enumerate(native.world_ranks)
        }
        return
    _torch.pg_group_ranks[group] = {rank: rank for rank in range(native.size)}
    if native.world_ranks != before.world_ranks:
        for other in [other for other in _torch.pg_map if other is not group]:
            distributed_c10d.destroy_process_group(other)
    # torch names groups by this number, which a rank that was left out has not counted up.
    _torch.group_count = consistency.maximum(native, _torch.group_count)
