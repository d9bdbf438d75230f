"""Register of scratch memory: host buffers kept between calls, one for each use and dtype."""

from __future__ import annotations

from enum import IntEnum, auto, unique


@unique
class Scratch(IntEnum):
    """Uses of ``Communicator.scratch`` that may be held at the same time."""

    # Keys of dictionaries on hot paths; Enum's own hash runs in Python.
    __hash__ = int.__hash__

    # Values of a wider type, a copied contribution or received pieces; only one of them at a time.
    WORK = auto()
    # A contribution to a reduction by pieces, which must not be overwritten.
    CONTRIBUTION = auto()
    # Sum and next term of a narrow type, in its wide type.
    TOTAL = auto()
    TERM = auto()
    # A contribution times its rank's factor.
    SCALED = auto()
    # Several short tensors, reduced as one.
    COALESCED = auto()
    # Kept by prepared calls on known memory (``fast_path``).
    PREPARED_WIDE = auto()
    PREPARED_RECEIVED = auto()
    PREPARED_GATHERED = auto()
    # First message of a broadcast.
    HEADER = auto()
