"""Services of RPC itself: functions that every worker answers, whatever its list, by messages of a kind of their own.

Each gets the sender's rank ahead of the arguments of the message, and checks them: they come from
any worker. There is no other function of this package that a message can name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from mpidist.errors import MpidistError

F = TypeVar("F", bound=Callable[..., Any])

names: dict[Callable[..., Any], str] = {}
_functions: dict[str, Callable[..., Any]] = {}


def service(function: F) -> F:
    """Register a function under its own name."""
    names[function] = function.__name__
    _functions[function.__name__] = function
    return function


def resolve(name: str) -> Callable[..., Any]:
    """Return the service of a name.

    Raises:
        MpidistError: There is none.
    """
    function = _functions.get(name)
    if function is None:
        raise MpidistError(
            f"{name!r} is no service of a worker; there are {', '.join(sorted(_functions))}"
        )
    return function
