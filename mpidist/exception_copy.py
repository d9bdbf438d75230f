"""Copies of exceptions, for those that are kept and raised more than once.

Each raise adds the frames that it passes to the exception, which then keeps them, those that have
called them, and all their variables alive.
"""

from __future__ import annotations

from typing import Any

_DEPTH = 8
_OF_PYTHON = 1 << 9  # CPython's flag of classes that are not static in C


def copy_exception(error: BaseException, depth: int = _DEPTH) -> BaseException:
    """Return an exception like another one, without its traceback and those of its causes.

    No ``__init__`` of Python is called: it may make its message of other arguments than ``args``.
    An exception that cannot be made in this way is returned itself.

    Args:
        error: The exception.
        depth: Most exceptions of its chain of causes and contexts.
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
    if depth > 1 and error.__cause__ is not None:
        made.__cause__ = _frameless(error.__cause__, depth - 1)
    elif depth > 1 and error.__context__ is not None and not error.__suppress_context__:
        made.__context__ = _frameless(error.__context__, depth - 1)
    made.__suppress_context__ = error.__suppress_context__
    return made


def _frameless(error: BaseException, depth: int) -> BaseException:
    chain = error.__traceback__, error.__cause__, error.__context__
    return error if chain == (None, None, None) else copy_exception(error, depth)


def _names(slots: str | tuple[str, ...]) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else slots
