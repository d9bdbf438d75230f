"""Method calls on a referenced value, run by its owner: ``rref.rpc_sync().method(…)``."""

from __future__ import annotations

from functools import partial
from typing import Any

from mpidist.dynamo import untraced
from mpidist.rpc import callee, current
from mpidist.rpc.constants import UNSET_RPC_TIMEOUT
from mpidist.rpc.methods import has_method

SYNC, ASYNC, REMOTE = "rpc_sync", "rpc_async", "remote"


@untraced
class Proxy:
    """Object with the methods of a referenced value.

    Args:
        rref: The reference.
        mode: ``SYNC`` returns results, ``ASYNC`` futures, ``REMOTE`` references.
        timeout: Seconds for each call.
    """

    def __init__(self, rref: object, mode: str, timeout: float) -> None:
        self._rref = rref
        self._mode = mode
        self._timeout = timeout

    def __getattr__(self, name: str) -> partial[Any]:
        return partial(_call, self._rref, self._mode, name, self._timeout)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the value itself."""
        return _call(self._rref, self._mode, "__call__", self._timeout, *args, **kwargs)


@untraced
class Proxied:
    """The methods of ``RRef`` that return proxies."""

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Proxy:
        """Return a proxy whose methods run on the owner and return results."""
        return Proxy(self, SYNC, timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Proxy:
        """Return a proxy whose methods run on the owner and return futures."""
        return Proxy(self, ASYNC, timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Proxy:
        """Return a proxy whose methods run on the owner and return references to their results."""
        return Proxy(self, REMOTE, timeout)


def _call(
    rref: Any, mode: str, name: str, timeout: float, /, *args: object, **kwargs: object
) -> Any:
    agent = rref._agent
    current.require()
    to, arguments, method = rref.owner().id, (rref, *args), callee.method(name)
    if mode == SYNC:
        return agent.calls.invoke(to, method, arguments, kwargs, timeout)
    if mode == ASYNC:
        return agent.calls.invoke_async(to, method, arguments, kwargs, timeout)
    data_only = agent.workers.data_only
    # A class cannot be sent as data: a data-only worker is asked for the method only.
    kind = (
        None
        if to in data_only or agent.workers.me.id in data_only
        else rref._get_type(timeout=timeout)
    )
    if not hasattr(kind, name) and not agent.calls.invoke(
        to, has_method, (rref, name), {}, timeout
    ):
        text = "the value's type" if kind is None else f"type object '{kind.__name__}'"
        raise AttributeError(
            f"{text} has no attribute '{name}', and neither has the value of {rref}"
        )
    return rref.create(agent, to, method, arguments, kwargs, timeout)
