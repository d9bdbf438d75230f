"""Keys of dicts and sets that another rank has sent: refused where many have one hash.

A dict of n keys with equal hashes takes n²/2 comparisons to build. Python's hashes of str and bytes
are random (unless PYTHONHASHSEED is set), and of ints and floats of 64 bits at most a few dozen are
equal; but ints of any length, complex numbers and tuples with one hash can be computed. So:

- a dict or set that this package builds is refused if its keys have one hash too often;
- a map of MessagePack, which msgspec builds, may have long ints, tuples and the like as keys only
  while it is small. The writer gives such dicts another form (``data_format.PAIRS``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import msgspec

from mpidist.comm.serialization.data_format import DEPTH
from mpidist.comm.serialization.tensor_format import Buffer
from mpidist.errors import FrameError

# Equal hashes that a dict or set may have: 100 comparisons per key.
_MOST_EQUAL = 200
# The headers map16 and map32; a map of 256 pairs or more has one of them. The count that follows is
# not compared with the data's length: a map that is cut off is built as far as it goes.
_MAP_16, _MAP_32 = b"\xde", b"\xdf"
_LARGE_MAP_16 = re.compile(rb"\xde[\x01-\xff]")
_LARGE = 256
LEAST_BYTES = 2 * _LARGE  # of a large map
_ARRAY_32 = b"\xdd"

_decode_items = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


def spread(keys: Sequence[Any]) -> Sequence[Any]:
    """Return keys, of which not too many have one hash.

    Raises:
        FrameError: More than 200 have one.
        TypeError: A key cannot be one.
    """
    if len(keys) > _MOST_EQUAL:
        ((_, count),) = Counter(map(hash, keys)).most_common(1)
        if count > _MOST_EQUAL:
            raise FrameError(
                f"{count} of {len(keys)} keys of a dict or set have one hash; {_MOST_EQUAL} may"
            )
    return keys


def require_scalars(data: Buffer) -> None:
    """Require that large maps of MessagePack have keys that MessagePack itself holds in a word.

    Raises:
        FrameError: A map of 256 pairs or more has another key; or a large map is nested more than
            100 deep.
        msgspec.DecodeError: The bytes are not MessagePack.
    """
    if _may_hold_large_map(data):
        _scan(memoryview(data), DEPTH)


def _may_hold_large_map(data: Buffer) -> bool:
    if len(data) <= LEAST_BYTES:
        return False
    # bytes.find is memchr, ten times as fast as the search of a pattern with alternatives.
    text = bytes(data)
    if text.find(_MAP_32) >= 0:
        return True
    first = text.find(_MAP_16)
    return first >= 0 and _LARGE_MAP_16.search(text, first) is not None


def _scan(data: memoryview, depth: int) -> None:
    if depth == 0:
        raise FrameError(f"maps nested more than {DEPTH} deep")
    head = data[0]
    if _is_array(head):
        values = _decode_items(data)
    elif (length := _length_of_map_header(head)) is not None:
        count = head & 0x0F if length == 1 else int.from_bytes(data[1:length], "big")
        # The pairs are the items of an array of twice the length.
        items = _decode_items(_array_header(2 * count) + bytes(data[length:]))
        if count >= _LARGE:
            _require_words(items[::2])
        values = items[1::2]
    else:
        return
    for value in [value for value in values if len(value) > LEAST_BYTES]:
        if _may_hold_large_map(held := memoryview(value)):
            _scan(held, depth - 1)


def _require_words(keys: Sequence[msgspec.Raw]) -> None:
    heads = set(map(itemgetter(0), map(bytes, keys)))
    if any(map(_is_compound, heads)):
        raise FrameError(
            f"a map of {len(keys)} pairs has keys that are no number, text or bytes: such a dict "
            "has another form"
        )


def _array_header(count: int) -> bytes:
    return _ARRAY_32 + count.to_bytes(5, "big")[-4:]


def _is_array(head: int) -> bool:
    return head & 0xF0 == 0x90 or head in (0xDC, 0xDD)


def _length_of_map_header(head: int) -> int | None:
    if head & 0xF0 == 0x80:
        return 1
    return {0xDE: 3, 0xDF: 5}.get(head)


def _is_compound(head: int) -> bool:
    """Return whether a value is an array, a map or an extension type."""
    return (
        _is_array(head)
        or _length_of_map_header(head) is not None
        or 0xC7 <= head <= 0xC9
        or 0xD4 <= head <= 0xD8
    )
