"""Register of scratch memory: the host buffers that algorithms keep between calls, one a use and dtype."""

from __future__ import annotations

from enum import IntEnum, auto, unique


@unique
class Scratch(IntEnum):
    """Uses of ``Communicator.scratch`` that may be held at the same time."""

    # values of a wider type, copies of a contribution, received pieces: one of them at a time
    WORK = auto()
    # a contribution to a reduction by pieces, which must not be overwritten
    CONTRIBUTION = auto()
    # sum and next term of narrow types, in the wide one
    TOTAL = auto()
    TERM = auto()
    # several short tensors as one
    COALESCED = auto()
    # kept in prepared calls of known memory (``fast_path``)
    PREPARED_WIDE = auto()
    PREPARED_RECEIVED = auto()
    # the length of a broadcast's tensor
    HEADER = auto()
