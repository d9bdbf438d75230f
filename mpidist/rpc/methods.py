"""Methods of referenced values, on their owner: the call of one, and the questions which there are."""

from __future__ import annotations

from typing import Any

from mpidist.rpc import functions, services
from mpidist.rpc.pickles import Reference


def call_method(name: str, rref: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a method of an owned value.

    Raises:
        TypeError: No reference.
        Refused: The list of this worker does not have the method.
        Exception: What it raises.
    """
    value, allowed = _owned(rref)
    method = getattr(value, name) if allowed is None else allowed.method(value, name)
    result = method(*args, **kwargs)
    return functions.deferred_result(method, result) if hasattr(method, functions.MARK) else result


@services.service
def type_of(source: int, /, rref: Any) -> type:
    """Return the type of an owned value."""
    return type(_owned(rref)[0])


@services.service
def has_method(source: int, /, rref: Any, name: str) -> bool:
    """Say whether an owned value has an attribute; with a list it must be a method that is allowed.

    Raises:
        Refused: It is not.
    """
    value, allowed = _owned(rref)
    return hasattr(value, name) if allowed is None else allowed.method(value, name) is not None


def _owned(rref: Any) -> tuple[Any, Any]:
    """Return an owned value, and the list of this worker."""
    if not isinstance(rref, Reference):
        raise TypeError(
            f"the first argument of a method is a reference; got a {type(rref).__name__}"
        )
    held: Any = rref
    return held.local_value(), held._agent.allowed
