"""Register of the library's own tags: one for each use of a group's communicator.

They lie above every tag that a user may give to a message (``Communicator.own_tag``). MPI matches
messages by (source, tag, communicator) alone (MPI-4.1 §3.2.2), so two uses of one number would
receive each other's messages. Communicators with a single purpose (watchdog, store) number their
own tags.
"""

from __future__ import annotations

from enum import IntEnum, unique

PIECE_TAGS = 32


@unique
class Tag(IntEnum):
    """Uses of a group's communicator, by number."""

    MOVEMENT = 0
    PAIRWISE = 1
    OBJECT_COLLECTIVE = 2
    # Users' object messages must not match the collectives' messages.
    OBJECT_MESSAGE = 3
    BARRIER_ARRIVAL = 4
    BARRIER_VERDICT = 5
    RING = 6
    EAGER = 7
    PAYLOAD = 8
    # Parts of an object after its first message: a probe for the next object must not match them.
    OBJECT_COLLECTIVE_PART = 9
    GROUP_CREATION = 10
    OBJECT_MESSAGE_PART = 11
    GROUP_END = 12
    # The first of PIECE_TAGS: pieces of one long message have one of them for themselves.
    MESSAGE_PIECE = 13
