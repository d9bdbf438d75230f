"""Methods of referenced values, on the owner: calls, and queries of type and attributes."""

from __future__ import annotations

from typing import Any

from mpidist.rpc import functions
from mpidist.rpc.names import services
from mpidist.rpc.names.allowlist import Allowed
from mpidist.rpc.values.pickles import Reference


def call_method(name: str, rref: object, /, *args: object, **kwargs: object) -> object:
    """Call a method of an owned value.

    Raises:
        TypeError: ``rref`` is not a reference.
        Refused: The method is not in this worker's list.
        Exception: The method has raised it.
    """
    value, allowed = _owned(rref)
    method = getattr(value, name) if allowed is None else allowed.method(value, name)
    result = method(*args, **kwargs)
    return functions.deferred_result(method, result) if hasattr(method, functions.MARK) else result


@services.service("the query for the type of a reference's value, which its remote() makes")
def type_of(source: int, /, rref: object) -> type:
    """Return the type of an owned value."""
    return type(_owned(rref)[0])


@services.service("the query for a method of a reference's value, which its remote() makes")
def has_method(source: int, /, rref: object, name: str) -> bool:
    """Return whether an owned value has an attribute.

    Raises:
        Refused: This worker has a list without this method.
    """
    value, allowed = _owned(rref)
    return hasattr(value, name) if allowed is None else allowed.method(value, name) is not None


def _owned(rref: object) -> tuple[object, Allowed | None]:
    """Return an owned value, and the list of this worker."""
    if not isinstance(rref, Reference):
        raise TypeError(
            f"the first argument of a method is a reference; got a {type(rref).__name__}"
        )
    held: Any = rref
    return held.local_value(), held._agent.allowed
