"""Copies of exceptions, for those that are kept and raised more than once.

Each raise adds the frames that it passes to the exception, which then keeps them and their
variables alive.
"""

from __future__ import annotations

from typing import Any

_OF_PYTHON = 1 << 9  # CPython's flag of classes that are not static in C


def copy_exception(error: BaseException) -> BaseException:
    """Return an exception like another one, with its cause and without its traceback.

    No ``__init__`` of Python is called: it may make its message of other arguments than ``args``.
    An exception that cannot be made in this way is returned itself.
    """
    kind = type(error)
    # The base whose layout in memory all others share: of a CommTimeout an OSError's.
    of_c: Any = kind
    while of_c.__flags__ & _OF_PYTHON:
        of_c = of_c.__base__
    try:
        # As pickle: with arguments that ``args`` may lack, as an OSError's file, and the state of
        # C, as an ImportError's name.
        _, args, *state = of_c.__reduce__(error)
        made: BaseException = of_c.__new__(kind, *args)
        of_c.__init__(made, *args)
        of_c.__setstate__(made, *(state or ({},)))
        for base in kind.__mro__:
            for name in _names(base.__dict__.get("__slots__", ())):
                if hasattr(error, name):
                    setattr(made, name, getattr(error, name))
    except Exception:
        return error
    made.args = error.args
    made.__cause__, made.__context__ = error.__cause__, error.__context__
    made.__suppress_context__ = error.__suppress_context__
    return made


def _names(slots: str | tuple[str, ...]) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else slots
