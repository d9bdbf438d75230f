"""Register of the library's own tags: each use of a group's communicator has one, which no other use may match.

They lie above every tag that a user may give to a message (``Communicator.own_tag``). MPI matches
messages by (source, tag, communicator) alone (MPI-4.1 §3.2.2), so two uses of one number would
take each other's messages. Communicators that serve one purpose (watchdog, store) number their own.
"""

from __future__ import annotations

from enum import IntEnum, unique


@unique
class Tag(IntEnum):
    """Uses of a group's communicator, by number."""

    MOVEMENT = 0
    PAIRWISE = 1
    OBJECT_COLLECTIVE = 2
    # users' object messages must not match the collectives' own
    OBJECT_MESSAGE = 3
    BARRIER_ARRIVAL = 4
    BARRIER_VERDICT = 5
    RING = 6
    EAGER = 7
    PAYLOAD = 8
    # parts of an object behind its first message: a probe for the next object must not match them
    OBJECT_COLLECTIVE_PART = 9
    GROUP_CREATION = 10
    OBJECT_MESSAGE_PART = 11
