"""``MPIDIST_TRUST``: whether other ranks may send pickles, which can run any code (pure).

``pickle``, or unset: any object is sent. ``data``: only plain data, tensors and arrays, and pickles
from other ranks are refused. The setting must be the same on all ranks: ``world`` compares it when
MPI starts, and raises an error on all ranks if ranks differ or a value is unknown.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

ENV_TRUST = "MPIDIST_TRUST"
# Numbers, because ranks compare them.
PICKLE, DATA, UNREADABLE = range(3)
_CODES = {"": PICKLE, "pickle": PICKLE, "data": DATA}
_WORDS = ("'pickle' or unset", "'data'", "neither 'pickle' nor 'data'")


def code() -> int:
    """Return this process's setting as a number: ``PICKLE``, ``DATA`` or ``UNREADABLE``."""
    return _CODES.get(os.environ.get(ENV_TRUST, ""), UNREADABLE)


def is_data_only(asked: bool | None = None) -> bool:
    """Return whether objects from other ranks are read as data only.

    Args:
        asked: The caller's choice; None for the variable.

    Raises:
        ValueError: ``asked`` is None and the variable is neither ``pickle`` nor ``data``.
    """
    if asked is not None:
        return bool(asked)
    setting = code()
    if setting == UNREADABLE:
        raise ValueError(
            f"{ENV_TRUST} must be 'pickle' or 'data', or unset; got {os.environ[ENV_TRUST]!r}"
        )
    return setting == DATA


def problem(codes: Sequence[int]) -> str | None:
    """Return the error in all ranks' settings, in rank order; None if equal and readable."""
    if set(codes) in ({PICKLE}, {DATA}):
        return None
    values = ", ".join(f"{_WORDS[code]} on rank {codes.index(code)}" for code in sorted(set(codes)))
    return f"{ENV_TRUST} must be 'pickle' or 'data', the same on all ranks; it is {values}"
