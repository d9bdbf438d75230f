"""Format of a recorder's file: header, slots, and table of signatures.

The file has a fixed size, and one process writes it by a shared mapping. Integers are
little-endian.

======================  ==========================================================================
``HEADER_BYTES``        ``HEADER``: magic, version, number of slots, of kept slots, bytes of the
                        table, bytes of it that are published, start on both clocks, start of the
                        process (clock ticks since the node's boot), rank, size, process id, and
                        the texts job, host and program, each padded by zeros
slots × ``SLOT_BYTES``  the ring: entry n stands in slot n modulo their number
kept × ``SLOT_BYTES``   entries whose slot was taken by a later one while they were under way
table                   records, each a length (``LENGTH``) and as many bytes of JSON
======================  ==========================================================================

A slot (``SLOT``): begin, end, sequence, bytes, tag, peer, signature, thread, and last its number.
The writer clears the slot before it fills it, and the number is stored last, so a slot without a
number is being written. A reader takes the number before and after it copies the slot; if they
differ, the slot was written in between and does not count. The end is one word, which is stored by
itself: ``UNDER_WAY``, a time of ``time.monotonic_ns``, or its negative where
the operation failed.

Records of the table, which is only appended to:

- ``["signature", kind, operation, group, dtype, [shape]]``; signatures are numbered from 0 in their
  order. The first ones are those of ``UNLISTED`` operations, one for each kind in the order of
  ``KINDS``, which stand for what came after the table was full.
- ``["group", label, key, ranks]`` with world ranks as a list, or as ``{"range": [start, stop,
  step]}``. The label is the group's name, made different from those of the process's other groups;
  the key is the same on all ranks. A worker of RPC is a group of itself, whose key is ``WORKER``.
- ``["world", key, first]``: the process has entered a world; first is the number of its first entry
  there. What follows, and the header's rank and size, are of that world: a label of a group stands
  for another group than before.
- ``["end", type, text, [[file, line, function], ...]]``: the exception that has ended the process,
  and where it was raised, the innermost frame first; or the reason for which mpidist has ended the
  job, without a type. The first one counts.
"""

from __future__ import annotations

import struct

MAGIC = b"mpidistR"
VERSION = 1

HEADER = struct.Struct("<8sIIIIqqqqiiq96s64s1024s")
HEADER_BYTES = 4096
PUBLISHED_OFFSET = 24  # of the bytes of the table that are published

SLOT = struct.Struct("<qqqqqiII4xq")
# The same as it is begun: its end is ``UNDER_WAY``, which is one argument less.
BEGUN = struct.Struct("<q8xqqqiII4xq")
# Of one signature, where bytes, tag, peer and signature are the same for all entries: ``CONSTANT``.
BEGUN_NEXT = struct.Struct("<q8xq24sI4xq")
CONSTANT = struct.Struct("<qqiI")
SLOT_BYTES = 64
SLOT_WORDS = SLOT_BYTES // 8
END_WORD, NUMBER_WORD = 1, 7  # of a slot
PEER_HALF_WORD = 10
UNDER_WAY = 0

LENGTH = struct.Struct("<I")

KINDS = (
    "collective", "send", "receive", "call", "handler", "backward", "step", "commit", "wait",
)  # fmt: skip
UNLISTED = "unlisted"
WORKER = "worker of RPC"


def file_bytes(slots: int, kept: int, table_bytes: int) -> int:
    """Return the size of a file."""
    return HEADER_BYTES + (slots + kept) * SLOT_BYTES + table_bytes
