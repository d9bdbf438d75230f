"""Services of RPC: functions of this package that every worker runs for others, also with a list.

A message of kind ``CALL_SERVICE`` names one. The sender's rank precedes the arguments of the
message. A service checks its arguments, because any worker may send them. A message can name no
other function of this package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mpidist.errors import MpidistError

F = TypeVar("F", bound=Callable[..., object])

names: dict[Callable[..., object], str] = {}
titles: dict[Callable[..., object], str] = {}
_functions: dict[str, Callable[..., object]] = {}


def service(title: str) -> Callable[[F], F]:
    """Register a function as a service under its own name.

    Args:
        title: What a call of it does, for messages to users, who have not called it themselves.
    """

    def register(function: F) -> F:
        names[function], titles[function] = function.__name__, title
        _functions[function.__name__] = function
        return function

    return register


def resolve(name: str) -> Callable[..., object]:
    """Return the service of a name.

    Raises:
        MpidistError: There is no such service.
    """
    function = _functions.get(name)
    if function is None:
        raise MpidistError(
            f"{name!r} is no service of a worker; there are {', '.join(sorted(_functions))}"
        )
    return function
