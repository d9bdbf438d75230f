"""Holder of a remote value: registration, forks and deletion by the protocol of ``rref_store``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch

from mpidist.errors import RRefError
from mpidist.rpc import current
from mpidist.rpc.creation import Creation
from mpidist.rpc.pickles import Reference
from mpidist.rpc.rref_store import Entry, id_parts
from mpidist.rpc.worker import WorkerInfo

if TYPE_CHECKING:
    from mpidist.rpc.agent import Agent

_LOST = (
    "RRef creation via rpc.remote() timed out, and it is possible that the RRef on the owner node "
    "does not exist: {what}; give remote() a longer timeout (0 for none)"
)


class Holder(Reference):
    """The base of ``RRef``; ``_set_up`` initialises it."""

    def _set_up(
        self,
        agent: Agent,
        owner: WorkerInfo,
        reference: int,
        fork: int | None,
        entry: Entry | None,
        creation: Creation | None,
    ) -> None:
        self._agent = agent
        self._owner = owner
        self._reference = reference
        self._fork = fork
        self._entry = entry
        self._creation = creation
        self._type: torch.futures.Future | None = None
        if fork is not None:
            agent.references.register_user(owner.id, reference, fork)

    @property
    def _deleted(self) -> bool:
        fork = self._fork
        return fork is not None and not self._agent.references.is_held(fork)

    def require_shareable(self) -> None:
        """Raise if this reference cannot be passed on."""
        if self._deleted:
            raise RRefError(f"{self!r} was deleted. Cannot call fork an UserRRef after deletion.")
        self._require_made()
        if self._agent is not current.agent:
            raise RRefError(f"{self!r} is of an earlier init_rpc and cannot be passed on")

    def fork(self, to: int) -> tuple[int, int, int]:
        """Count a new holder on rank ``to``; return reference, fork and the owner's rank."""
        agent = self._agent
        references = agent.references
        fork = references.store.make_id()
        if self._entry is not None:
            references.store.keep(self._entry, fork)
        elif self._owner.id != to:
            references.announce(self._owner.id, ((self._reference, fork),))
        return self._reference, fork, self._owner.id

    def delete(self) -> None:
        """Queue the delete of this holder; the reference cannot be used afterwards. Idempotent."""
        if self._fork is not None:
            self._agent.references.delete_user(self._fork)

    def __del__(self) -> None:
        # A finalizer runs anywhere, also within MPI calls: it only queues the delete.
        if getattr(self, "_fork", None) is not None:
            self.delete()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        if self._deleted:
            raise RRefError(f"{self!r} was deleted. Cannot call fork an UserRRef after deletion.")
        raise RRefError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC"
        )

    def __repr__(self) -> str:
        if self._fork is None:
            return f"OwnerRRef({unique(self._reference)})"
        return f"UserRRef(RRefId = {unique(self._reference)}, ForkId = {unique(self._fork)})"

    __str__ = __repr__

    def _require_made(self) -> None:
        creation = self._creation
        if creation is not None and creation.is_lost:
            raise RRefError(_LOST.format(what=creation.error))


def unique(identity: int) -> str:
    """Return an id as torch writes it."""
    rank, number = id_parts(identity)
    return f"GloballyUniqueId(created_on={rank}, local_id={number})"
