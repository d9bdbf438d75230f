"""Workers of one ``init_rpc``: names and ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mpidist.errors import MpidistError

_MAX_NAME = 128
_NAME = re.compile(r"[A-Za-z0-9\-_:]+")


@dataclass(frozen=True, slots=True, order=True)
class WorkerInfo:
    """Name and rank of a worker.

    Attributes:
        name: Letters, digits, ``-``, ``_`` and ``:``; fewer than 128 characters.
        id: The rank.

    Raises:
        MpidistError: The name is invalid (a ``RuntimeError``, as in torch).
    """

    name: str
    id: int

    def __post_init__(self) -> None:
        check_name(self.name)

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


Destination = str | int | WorkerInfo


def check_name(name: str) -> None:
    """Check a worker's name.

    Raises:
        TypeError: The name is not a str.
        MpidistError: The name is empty, too long, or has other characters.
    """
    if not isinstance(name, str):
        raise TypeError(f"a worker's name is a str; got {type(name).__name__}")
    if not name:
        raise MpidistError("Worker name must be non-empty")
    if len(name) >= _MAX_NAME:
        raise MpidistError(
            f"Worker name must be shorter than {_MAX_NAME} characters; got {len(name)}"
        )
    if not _NAME.fullmatch(name):
        raise MpidistError(f"Worker name must match {_NAME.pattern}; got {name!r}")


def duplicate_names(workers: Sequence[WorkerInfo]) -> list[str]:
    """Return the names that more than one worker has."""
    names = [worker.name for worker in workers]
    return sorted({name for name in names if names.count(name) > 1})


class Workers:
    """The workers of a group, by rank and by name.

    Attributes:
        infos: By rank.
        me: This one.
        world_ranks: By rank.
        left: Ranks that have left RPC or died.
        dead: Those of them that MPI has reported as dead.
        data_only: Ranks that read data only, because they have a list.
    """

    def __init__(
        self,
        infos: Sequence[WorkerInfo],
        rank: int,
        world_ranks: Sequence[int],
        data_only: Iterable[int] = (),
    ) -> None:
        self.infos = tuple(infos)
        self.me = self.infos[rank]
        self.world_ranks = tuple(world_ranks)
        self.left: set[int] = set()
        self.dead: set[int] = set()
        self.data_only = frozenset(data_only)
        self._ranks = {info.name: info.id for info in infos}

    def loss_of(self, rank: int) -> str:
        """Return a clause about a worker that has left."""
        name = self.infos[rank].name
        if rank in self.dead:
            return f"{name} (world rank {self.world_ranks[rank]}) has died"
        return (
            f"{name} has left RPC (shutdown without graceful, the end of its program, or its death)"
        )

    def rank_of(self, to: Destination) -> int:
        """Return the rank of a worker, given its name, rank or ``WorkerInfo``.

        A worker that has left RPC keeps its rank; a call to it raises RankFailureError.

        Raises:
            ValueError: ``to`` is neither a name, nor a rank, nor a worker.
            MpidistError: No such worker.
        """
        if type(to) is str and to in self._ranks:
            return self._ranks[to]
        if isinstance(to, str):
            rank = -1
        elif isinstance(to, int) and not isinstance(to, bool):
            rank = to
        elif hasattr(to, "name") and hasattr(to, "id"):
            rank = self._ranks.get(to.name, -1)
        else:
            raise ValueError(f"a worker is a name, a rank or a WorkerInfo; got {to!r}")
        if not 0 <= rank < len(self.infos):
            names = ", ".join(worker.name for worker in self.infos[:8])
            raise MpidistError(
                f"could not find destination {to!r}: the {len(self.infos)} workers are {names}"
                f"{', ...' if len(self.infos) > 8 else ''}"
            )
        return rank
