"""``MPIDIST_TRUST``: whether other ranks may send pickles, which can run any code.

``pickle``, or unset: any object is sent. ``data``: only plain data, tensors and arrays, and pickles
from other ranks are refused. The setting must be the same on all ranks: ``world`` compares it when
MPI starts, and raises an error on all ranks if ranks differ or a value is unknown.
"""

from __future__ import annotations

import os

from mpidist.comm.mpi.word_setting import WordSetting

ENV_TRUST = "MPIDIST_TRUST"
PICKLE, DATA, UNREADABLE = range(3)
SETTING = WordSetting(
    ENV_TRUST,
    {"": PICKLE, "pickle": PICKLE, "data": DATA},
    ("'pickle' or unset", "'data'"),
    "'pickle' or 'data'",
)


def is_data_only(asked: bool | None = None) -> bool:
    """Return whether objects from other ranks are read as data only.

    Args:
        asked: The caller's choice; None for the variable.

    Raises:
        ValueError: ``asked`` is None and the variable is neither ``pickle`` nor ``data``.
    """
    if asked is not None:
        return bool(asked)
    setting = SETTING.code()
    if setting == UNREADABLE:
        raise ValueError(
            f"{ENV_TRUST} must be 'pickle' or 'data', or unset; got {os.environ[ENV_TRUST]!r}"
        )
    return setting == DATA
