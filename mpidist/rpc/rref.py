"""Remote references (``RRef``): handles of values on their owner, and proxies that call methods.

Registration, forks and deletion follow the protocol of ``rref_store``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import torch

from mpidist import torch_futures
from mpidist.dynamo import untraced
from mpidist.errors import MpidistError, RRefError
from mpidist.exception_copy import copy_exception
from mpidist.rpc import current
from mpidist.rpc.constants import UNSET_RPC_TIMEOUT
from mpidist.rpc.message import WORD, Kind
from mpidist.rpc.names import callee
from mpidist.rpc.options import seconds
from mpidist.rpc.rref_store import Entry, id_parts
from mpidist.rpc.serving import methods
from mpidist.rpc.threads import interceptor
from mpidist.rpc.threads.call import Creation
from mpidist.rpc.values.pickles import Reference
from mpidist.rpc.worker import WorkerInfo

if TYPE_CHECKING:
    from mpidist.rpc.agent import Agent
    from mpidist.rpc.values.codec import Args, Kwargs

T = TypeVar("T")

_SYNC, _ASYNC, _REMOTE = "rpc_sync", "rpc_async", "remote"  # modes of a proxy
_TO_HERE = "to_here() of a reference"
_BACKWARD = "backward() of a reference"
_LOST = (
    "RRef creation via rpc.remote() timed out, and it is possible that the RRef on the owner node "
    "does not exist: {what}; give remote() a longer timeout (0 for none)"
)


@untraced
class RRef(Reference, Generic[T]):
    """A remote reference. The constructor makes the owner's; ``remote`` and messages make users'.

    A reference can be passed to any worker in arguments and results, alone or within containers and
    objects, but not pickled otherwise. The value lives until the last holder has dropped its
    reference. ``rref.rpc_sync().method(…)`` calls a method of the value on its owner.

    Args:
        value: Any object; it stays on this worker.
        type_hint: Ignored; for torch's signature.

    Raises:
        MpidistError: RPC is not initialised.
    """

    def __init__(self, value: T, type_hint: object = None) -> None:
        agent = current.agent
        if agent is None:
            raise MpidistError(
                "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by "
                "calling `rpc.init_rpc`)?"
            )
        entry = Entry(agent.references.store.make_id())
        agent.references.set_value(entry, value)
        self._set_up(agent, agent.workers.me, entry.reference, None, entry, None)

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

    def is_owner(self) -> bool:
        """Return whether the value is on this worker."""
        return self._entry is not None

    def owner(self) -> WorkerInfo:
        """Return the worker that has the value."""
        return self._owner

    def owner_name(self) -> str:
        """Return the name of the worker that has the value."""
        return self._owner.name

    def confirmed_by_owner(self) -> bool:
        """Return whether the owner knows of this holder.

        True for every reference that was received in a message: its fork is announced before the
        value can be freed (``rref_store``).
        """
        creation = self._creation
        return (
            self._entry is not None
            or creation is None
            or (creation.done and creation.reason() is None)
        )

    def local_value(self) -> T:
        """Return the value itself, on its owner.

        Blocks: until the value is set.

        Raises:
            RRefError: This worker is not the owner.
            Exception: The creation of the value has raised it.
        """
        if self._entry is None:
            raise RRefError(
                f"For UserRRef(rref_id={_torch_id(self._reference)}, "
                f"fork_id={_torch_id(self._fork or 0)}), can't call localValue() on user "
                f"{self._agent.workers.me}. Call it on owner {self._owner}, or to_here() for a copy"
            )
        return self._own_value(0.0)

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Return the value itself on its owner, a copy on other workers.

        Blocks: until the value is set and has arrived.

        Args:
            timeout: Seconds; 0 for no limit. Default: ``rpc_timeout`` of the options.

        Raises:
            CommTimeout: No answer in time.
            RRefError: The reference was deleted, or ``remote`` had no answer in time.
            Exception: The creation of the value has raised it.
        """
        if self._entry is not None:
            return self._own_value(0.0 if timeout == UNSET_RPC_TIMEOUT else timeout)
        if self._deleted:
            raise RRefError(f"{self!r} was deleted. Cannot call to_here() on it after deletion.")
        self._require_made()
        return self._agent.calls.request(
            self._owner.id, Kind.RREF_FETCH, WORD.pack(self._reference), None, timeout, _TO_HERE
        )

    @staticmethod
    def create(
        agent: Agent, to: int, function: object, args: Args, kwargs: Kwargs, timeout: float
    ) -> RRef[Any]:
        """Call a function on a worker and return a reference to its result, which stays on it."""
        calls = agent.calls
        timeout_s = calls.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else seconds(timeout)
        reference, fork, entry, creation = agent.references.create(
            to, function, args, kwargs, timeout_s
        )
        if entry is not None:
            return owner_rref(agent, entry, creation)
        return user_rref(agent, agent.workers.infos[to], reference, fork, creation)

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Proxy:
        """Return a proxy whose methods run on the owner and return results."""
        return Proxy(self._call_method, _SYNC, timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Proxy:
        """Return a proxy whose methods run on the owner and return futures."""
        return Proxy(self._call_method, _ASYNC, timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Proxy:
        """Return a proxy whose methods run on the owner and return references to their results."""
        return Proxy(self._call_method, _REMOTE, timeout)

    def _call_method(
        self, mode: str, name: str, timeout: float, /, *args: object, **kwargs: object
    ) -> Any:
        """Call a method of the value on its owner, for a ``Proxy``."""
        agent = self._agent
        current.require()
        to, arguments, method = self._owner.id, (self, *args), callee.method(name)
        if mode == _SYNC:
            return agent.calls.invoke(to, method, arguments, kwargs, timeout)
        if mode == _ASYNC:
            return agent.calls.invoke_async(to, method, arguments, kwargs, timeout)
        data_only = agent.workers.data_only
        # A class cannot be sent as data: a data-only worker is asked for the method only.
        kind = (
            None
            if to in data_only or agent.workers.me.id in data_only
            else self._get_type(timeout=timeout)
        )
        if not hasattr(kind, name) and not agent.calls.invoke(
            to, methods.has_method, (self, name), {}, timeout
        ):
            text = "the value's type" if kind is None else f"type object '{kind.__name__}'"
            raise AttributeError(
                f"{text} has no attribute '{name}', and neither has the value of {self}"
            )
        return self.create(agent, to, method, arguments, kwargs, timeout)

    def backward(
        self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False, mode: str = "fast"
    ) -> None:
        """Run the backward pass from the value, a scalar tensor, on its owner.

        Args:
            dist_autograd_ctx_id: The distributed context. The owner may omit it for a local pass.
            retain_graph: Keep the graph for another pass.
            mode: ``"fast"`` or ``"smart"``: see ``mpidist.autograd.backward``.
        """
        if self._entry is None:
            if dist_autograd_ctx_id == -1:
                raise MpidistError("User RRefs require 'dist_autograd_ctx_id' to be specified")
            content = (self, dist_autograd_ctx_id, retain_graph, mode)
            # A kind of its own, so that a list of allowed functions need not name it.
            kind = Kind.BACKWARD_AUTOGRAD
            self._agent.calls.request(
                self._owner.id, kind, b"", content, UNSET_RPC_TIMEOUT, _BACKWARD
            )
            return
        _run_backward(self.local_value(), dist_autograd_ctx_id, retain_graph, mode)

    def _require_made(self) -> None:
        creation = self._creation
        if creation is not None and creation.is_lost:
            raise RRefError(_LOST.format(what=creation.error))

    def _own_value(self, timeout_s: float) -> T:
        entry = self._entry
        assert entry is not None
        if not entry.is_set:
            self._require_made()
            self._agent.references.wait_for_entry(entry, timeout_s, self._creation)
            if not entry.is_set:
                self._require_made()
        if entry.error is not None:
            # Not the exception itself: its traceback would lead to the functions that have read the
            # value, and their variables to this reference.
            raise copy_exception(entry.error)
        value: T = entry.value_here()
        return value

    def _get_future(self) -> torch.futures.Future:
        """Return a future that completes when the value's creation has ended (torch's name)."""
        creation = self._creation
        if creation is not None:
            return creation.future()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(None)
        return future

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """Return the value's type, or a future of it; the owner is asked once (torch's name)."""
        if self._type is None:
            if self._entry is not None and blocking:
                # Not by a future: a handler that waits in Polling does not count as running, so the
                # handler that makes the value can run.
                return type(self._own_value(0.0 if timeout == UNSET_RPC_TIMEOUT else timeout))
            if self._entry is not None:
                self._type = _future_of_type(self._entry)
            else:
                self._type = self._agent.calls.invoke_async(
                    self._owner.id, methods.type_of, (self,), {}, timeout
                )
        return self._type.wait() if blocking else self._type

    def _serialize(self) -> None:
        """Raise if this reference cannot be passed on (torch's name)."""
        self.require_shareable()

    # The protocol of forks (``rref_store``).

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
            references.store.keep(self._entry, fork, to)
        elif self._owner.id != to:
            references.announce(self._owner.id, to, ((self._reference, fork),))
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
            return f"OwnerRRef({_torch_id(self._reference)})"
        return f"UserRRef(RRefId = {_torch_id(self._reference)}, ForkId = {_torch_id(self._fork)})"

    __str__ = __repr__


PyRRef = RRef


@untraced
class Proxy:
    """Object with the methods of a referenced value.

    Args:
        call: Calls a method of the value: ``call(mode, name, timeout, *args, **kwargs)``.
        mode: ``"rpc_sync"`` returns results, ``"rpc_async"`` futures, ``"remote"`` references.
        timeout: Seconds for each call.
    """

    def __init__(self, call: Callable[..., Any], mode: str, timeout: float) -> None:
        self._call = call
        self._mode = mode
        self._timeout = timeout

    def __getattr__(self, name: str) -> partial[Any]:
        return partial(self._call, self._mode, name, self._timeout)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the value itself."""
        return self._call(self._mode, "__call__", self._timeout, *args, **kwargs)


def user_rref(
    agent: Agent, owner: WorkerInfo, reference: int, fork: int, creation: Creation | None
) -> RRef[Any]:
    """Make a reference to another worker's value."""
    rref: RRef[Any] = RRef.__new__(RRef)
    rref._set_up(agent, owner, reference, fork, None, creation)
    return rref


def owner_rref(agent: Agent, entry: Entry, creation: Creation | None = None) -> RRef[Any]:
    """Make a reference to an owned value."""
    rref: RRef[Any] = RRef.__new__(RRef)
    rref._set_up(agent, agent.workers.me, entry.reference, None, entry, creation)
    return rref


def from_wire(agent: Agent, reference: int, fork: int, owner: int) -> RRef[Any]:
    """Make the reference that a message contains."""
    if owner != agent.workers.me.id:
        return user_rref(agent, agent.workers.infos[owner], reference, fork, None)
    # The new reference holds the entry, so the message's own fork ends here.
    return owner_rref(agent, agent.references.store.redeem(reference, fork))


def _future_of_type(entry: Entry) -> torch.futures.Future:
    """Return a future of the type of an owned value, which may not be set yet."""
    future: torch.futures.Future = torch.futures.Future()

    def complete(entry: Entry) -> None:
        if entry.error is not None:
            torch_futures.set_exception(future, entry.error)
        else:
            torch_futures.set_result(future, type(entry.value))

    entry.when_set(complete)
    return future


def _run_backward(value: object, context_id: int, retain_graph: bool, mode: str) -> None:
    """Run a backward pass from an owned value."""
    if not isinstance(value, torch.Tensor):
        raise MpidistError("RRef should contain a tensor for .backward()")
    if context_id == -1:
        value.backward(retain_graph=retain_graph)
        return
    engine = interceptor.engine
    if engine is None:
        raise MpidistError(
            f"Could not find autograd context with id: {context_id}; distributed autograd is not "
            "in use here"
        )
    engine.backward(context_id, value, retain_graph, mode)


def _torch_id(identity: int) -> str:
    """Return an id as torch writes it."""
    rank, number = id_parts(identity)
    return f"GloballyUniqueId(created_on={rank}, local_id={number})"
