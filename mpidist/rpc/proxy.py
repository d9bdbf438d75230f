"""Calls of a referenced value's methods on its owner: ``rref.rpc_sync().method(…)``."""

from __future__ import annotations

from functools import partial
from typing import Any

from mpidist.dynamo import untraced
from mpidist.rpc import current, functions
from mpidist.rpc.constants import UNSET_RPC_TIMEOUT

SYNC, ASYNC, REMOTE = "rpc_sync", "rpc_async", "remote"


@untraced
class Proxy:
    """Has the methods of a referenced value.

    Args:
        rref: The reference.
        mode: How they are called, and what they return.
        timeout: Seconds for each call.
    """

    def __init__(self, rref: Any, mode: str, timeout: float) -> None:
        self._rref = rref
        self._mode = mode
        self._timeout = timeout

    def __getattr__(self, name: str) -> Any:
        return partial(_call, self._rref, self._mode, name, self._timeout)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the value itself."""
        return _call(self._rref, self._mode, "__call__", self._timeout, *args, **kwargs)


@untraced
class Proxied:
    """The methods of ``RRef`` that return proxies."""

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a helper whose methods are the value's, called on the owner; they return results."""
        return Proxy(self, SYNC, timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a helper whose methods are the value's, called on the owner; they return futures."""
        return Proxy(self, ASYNC, timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a helper whose methods are the value's, called on the owner; they return references to their results."""
        return Proxy(self, REMOTE, timeout)


def _call(rref: Any, mode: str, name: str, timeout: float, /, *args: Any, **kwargs: Any) -> Any:
    agent = rref._agent
    current.require()
    to, arguments = rref.owner().id, (rref, name, args, kwargs)
    if mode == SYNC:
        return agent.calls.invoke(to, call_method, arguments, {}, timeout)
    if mode == ASYNC:
        return agent.calls.invoke_async(to, call_method, arguments, {}, timeout)
    kind = rref._get_type(timeout=timeout)
    if not hasattr(kind, name) and not agent.calls.invoke(to, has_attribute, (rref, name), {}, timeout):
        raise AttributeError(f"type object '{kind.__name__}' has no attribute '{name}', and neither has the value of {rref}")
    return rref.create(agent, to, call_method, arguments, {}, timeout)


def call_method(rref: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Call a method of an owned value; run by its owner."""
    value = rref.local_value()
    allowed = current.require().allowed
    if allowed is not None:
        allowed.require_method(value, name)
    method = getattr(value, name)
    result = method(*args, **kwargs)
    return functions.later(method, result) if hasattr(method, functions.MARK) else result


def type_of(rref: Any) -> type:
    """Return the type of an owned value; run by its owner."""
    return type(rref.local_value())


def has_attribute(rref: Any, name: str) -> bool:
    """Say whether an owned value has an attribute; run by its owner."""
    return hasattr(rref.local_value(), name)
