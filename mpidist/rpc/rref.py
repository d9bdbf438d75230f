"""A value on another worker, or on this one, under a name that can travel: the protocol is in ``rref_store``."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from mpidist.errors import CommTimeout, MpidistError, RRefError
from mpidist.rpc import codec, current, interceptor, proxy
from mpidist.rpc.call import Call
from mpidist.rpc.constants import UNSET_RPC_TIMEOUT
from mpidist.rpc.message import Kind
from mpidist.rpc.rref_store import Entry, id_parts
from mpidist.rpc.target import TO_REMOTE, target_of
from mpidist.rpc.worker import WorkerInfo

if TYPE_CHECKING:
    from mpidist.rpc.agent import Agent

T = TypeVar("T")

_LOST = (
    "RRef creation via rpc.remote() timed out, and it is possible that the RRef on the owner node does not exist: "
    "{what}; give remote() a longer timeout (0 for none)"
)


class Creation:
    """What became of a call of ``remote``.

    Attributes:
        done: The owner has answered, or was too late.
        lost: It was too late: nobody knows whether the value exists.
        error: What made it fail on the way, or on the owner.
    """

    def __init__(self) -> None:
        self.done = False
        self.lost = False
        self.error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._lock = threading.Lock()

    def settle(self, error: BaseException | None) -> None:
        """Note how it ended."""
        with self._lock:
            self.error, self.lost = error, isinstance(error, CommTimeout)
            self.done = True
            future = self._future
        if future is not None:
            _complete(future, error)

    def future(self) -> torch.futures.Future[Any]:
        """Return a future that is complete when the owner has answered."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if not self.done:
                    return self._future
                _complete(self._future, self.error)
            return self._future


class RRef(codec.Reference, Generic[T]):
    """A remote reference. Made of a value, it is the owner's; ``remote`` and messages make users'.

    It can be passed to any worker in arguments and results, alone or within containers and objects, and to nothing else. The
    value lives until the last holder has dropped it. Calls on the value go by ``rref.rpc_sync().method(…)`` and its kin.

    Args:
        value: Any object; it stays where it is.
        type_hint: The value's type; torch's, taken for its signature.

    Raises:
        MpidistError: RPC is not initialised.
    """

    def __init__(self, value: T, type_hint: Any = None) -> None:
        agent = current.agent
        if agent is None:
            raise MpidistError(
                "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"
            )
        entry = Entry(agent.store.make_id())
        entry.set(value)
        self._set_up(agent, agent.me, entry.reference, None, entry, None)

    def _set_up(
        self, agent: Agent, owner: WorkerInfo, reference: int, fork: int | None, entry: Entry | None, creation: Creation | None
    ) -> None:
        self._agent = agent
        self._owner = owner
        self._reference = reference
        self._fork = fork
        self._entry = entry
        self._creation = creation
        self._type: Any = None  # a future
        self._deleted = False
        if fork is not None:
            agent.users.add(self)

    def is_owner(self) -> bool:
        """Say whether the value lives on this worker."""
        return self._entry is not None

    def owner(self) -> WorkerInfo:
        """Return the worker on which the value lives."""
        return self._owner

    def owner_name(self) -> str:
        """Return its name."""
        return self._owner.name

    def confirmed_by_owner(self) -> bool:
        """Say whether the owner knows of this holder.

        Of a reference that came in a message that is certain: the owner is told before its value could go (``rref_store``).
        """
        creation = self._creation
        return self._entry is not None or creation is None or (creation.done and creation.error is None)

    def local_value(self) -> T:
        """Return the value itself, on its owner.

        Blocks: until it is there.

        Raises:
            RRefError: This worker is not the owner.
            Exception: What the value's creation raised.
        """
        if self._entry is None:
            raise RRefError(
                f"For UserRRef(rref_id={_unique(self._reference)}, fork_id={_unique(self._fork or 0)}), can't call localValue() "
                f"on user {self._agent.me}. Call it on owner {self._owner}, or to_here() for a copy"
            )
        return self._own_value(0.0)

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Return the value: itself on its owner, elsewhere a copy.

        Blocks: until it is there.

        Args:
            timeout: Seconds; 0 for no end, and if not given the options'.

        Raises:
            CommTimeout: No answer in time.
            RRefError: The reference was deleted, or ``remote`` had no answer in time.
            Exception: What the value's creation raised.
        """
        if self._entry is not None:
            return self._own_value(0.0 if timeout == UNSET_RPC_TIMEOUT else timeout)
        if self._deleted:
            raise RRefError(f"{self!r} was deleted. Cannot call to_here() on it after deletion.")
        self._require_made()
        call = self._agent.request(self._owner.id, Kind.RREF_FETCH, None, timeout, f"to_here of {self!r}", ids=(self._reference,))
        return self._agent.wait_for_result(call)

    @staticmethod
    def create(agent: Agent, to: int, function: Any, args: Any, kwargs: Any, timeout: float) -> RRef[Any]:
        """See ``create``; for the proxies."""
        return create(agent, to, function, args, kwargs, timeout)

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a helper whose methods are the value's, called on the owner; they return results."""
        return proxy.Proxy(self, proxy.SYNC, timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a helper whose methods are the value's, called on the owner; they return futures."""
        return proxy.Proxy(self, proxy.ASYNC, timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a helper whose methods are the value's, called on the owner; they return references to their results."""
        return proxy.Proxy(self, proxy.REMOTE, timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run the backward pass from the value, a scalar tensor, on its owner.

        Args:
            dist_autograd_ctx_id: The distributed context; the owner may leave it out, for a local pass.
            retain_graph: Keep the graph for another pass.
        """
        if self._entry is None:
            if dist_autograd_ctx_id == -1:
                raise MpidistError("User RRefs require 'dist_autograd_ctx_id' to be specified")
            self._agent.invoke(self._owner.id, run_backward, (self, dist_autograd_ctx_id, retain_graph), {}, UNSET_RPC_TIMEOUT)
            return
        run_backward(self, dist_autograd_ctx_id, retain_graph)

    def require_shareable(self) -> None:
        """Raise what keeps this reference from being passed on."""
        if self._deleted:
            raise RRefError(f"{self!r} was deleted. Cannot call fork an UserRRef after deletion.")
        self._require_made()
        if self._agent is not current.agent:
            raise RRefError(f"{self!r} is of an earlier init_rpc and cannot be passed on")

    def fork(self, to: int) -> tuple[int, int, int]:
        """Count a new holder on rank ``to``."""
        agent = self._agent
        fork = agent.store.make_id()
        if self._entry is not None:
            agent.store.keep(self._entry, fork)
        elif self._owner.id != to:
            agent.announce(self._owner.id, self._reference, fork)
        return self._reference, fork, self._owner.id

    def delete(self) -> None:
        """Tell the owner that this holder is gone; the reference cannot be used any more. Again does nothing."""
        fork = self._fork
        if fork is not None and not self._deleted:
            self._deleted = True
            self._agent.queue_delete(self._owner.id, self._reference, fork)

    def __del__(self) -> None:
        # A finalizer runs anywhere, within MPI's calls, too: it only puts down what others send.
        if getattr(self, "_fork", None) is not None:
            self.delete()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._deleted:
            raise RRefError(f"{self!r} was deleted. Cannot call fork an UserRRef after deletion.")
        raise RRefError("Can not pickle rref in python pickler, rref can only be pickled when using RPC")

    def __repr__(self) -> str:
        if self._fork is None:
            return f"OwnerRRef({_unique(self._reference)})"
        return f"UserRRef(RRefId = {_unique(self._reference)}, ForkId = {_unique(self._fork)})"

    __str__ = __repr__

    def _own_value(self, timeout_s: float) -> T:
        entry = self._entry
        assert entry is not None
        if not entry.is_set:
            self._require_made()
            self._agent.wait_for_entry(entry, timeout_s, self._creation)
            if not entry.is_set:
                self._require_made()
        if entry.error is not None:
            raise entry.error
        value: T = entry.value
        return value

    def _require_made(self) -> None:
        creation = self._creation
        if creation is not None and creation.lost:
            raise RRefError(_LOST.format(what=creation.error))

    def _get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is complete when the value's creation has ended (torch's name)."""
        creation = self._creation
        if creation is None:
            creation = Creation()
            creation.settle(None)
        return creation.future()

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """Return the value's type, or a future of it; asked of the owner once."""
        if self._type is None:
            if self._entry is not None:
                self._type = self._agent.future_of_entry(self._entry, type)
            else:
                self._type = self._agent.invoke_async(self._owner.id, proxy.type_of, (self,), {}, timeout)
        return self._type.wait() if blocking else self._type

    def _serialize(self) -> None:
        """Raise what would keep this reference from being passed on (torch's name)."""
        self.require_shareable()


PyRRef = RRef


def create(agent: Agent, to: int, function: Any, args: Any, kwargs: Any, timeout: float) -> RRef[Any]:
    """Call a function on a worker and return a reference to its result, which stays there."""
    kind, named, what = target_of(function)
    reference, fork, creation = agent.store.make_id(), agent.store.make_id(), Creation()
    owner = agent.worker(to)
    entry = agent.store.create(reference, fork) if owner == agent.me else None

    def settle(call: Call) -> None:
        agent.creations.discard(creation)
        if call.error is None and call.arrival.note.kind == Kind.EXCEPTION:
            agent.polling.submit(lambda: creation.settle(agent.error_of(call)))
        else:
            creation.settle(call.error)
        if entry is not None:
            agent.store.delete_fork(reference, fork)

    agent.creations.add(creation)
    try:
        what = f"remote {what} on {owner.name}"
        agent.request(to, kind + TO_REMOTE, (named, args, kwargs), timeout, what, (reference, fork), settle=settle)
    except BaseException:
        agent.creations.discard(creation)
        if entry is not None:
            agent.store.delete_fork(reference, fork)
        raise
    return owned(agent, entry, creation) if entry is not None else user(agent, owner, reference, fork, creation)


def user(agent: Agent, owner: WorkerInfo, reference: int, fork: int, creation: Creation | None) -> RRef[Any]:
    """Make a user's reference."""
    made: RRef[Any] = RRef.__new__(RRef)
    made._set_up(agent, owner, reference, fork, None, creation)
    return made


def owned(agent: Agent, entry: Entry, creation: Creation | None = None) -> RRef[Any]:
    """Make the owner's reference to an entry."""
    made: RRef[Any] = RRef.__new__(RRef)
    made._set_up(agent, agent.me, entry.reference, None, entry, creation)
    return made


def adopt(agent: Agent, reference: int, fork: int, owner: int) -> RRef[Any]:
    """Make the reference that a message brought."""
    if owner != agent.me.id:
        return user(agent, agent.worker(owner), reference, fork, None)
    made = owned(agent, agent.store.find(reference))
    agent.store.delete_fork(reference, fork)  # the message's own; from here on the reference holds the entry
    return made


def run_backward(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    """Run a backward pass from an owned value."""
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise MpidistError("RRef should contain a tensor for .backward()")
    if context_id == -1:
        value.backward(retain_graph=retain_graph)
        return
    engine = interceptor.registered()
    if engine is None:
        raise MpidistError(f"Could not find autograd context with id: {context_id}; distributed autograd is not in use here")
    engine.backward(context_id, value, retain_graph)


def _unique(identity: int) -> str:
    rank, number = id_parts(identity)
    return f"GloballyUniqueId(created_on={rank}, local_id={number})"


def _complete(future: torch.futures.Future[Any], error: BaseException | None) -> None:
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
