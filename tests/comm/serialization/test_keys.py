"""Keys that hash alike, in dicts and sets that another rank has sent."""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import pytest

from mpidist.comm.serialization import data_format, data_reader, data_writer, keys
from mpidist.errors import FrameError

Ext, encode = msgspec.msgpack.Ext, msgspec.msgpack.encode
MODULUS = (1 << 61) - 1  # of Python's hashes of numbers
COUNT = 20_000
# Tuples of two ints whose hashes are equal: the second undoes the first in CPython's tuplehash.
PRIMES = 11400714785074694791, 14029467366897019727, 2870177450012600261
MASK = (1 << 64) - 1


def rotated(value, by=31):
    return ((value << by) | (value >> (64 - by))) & MASK


def alike_tuples(count):
    """Return distinct tuples of two ints with one hash."""
    p1, p2, p5 = PRIMES
    inverse = pow(p2, -1, 1 << 64)

    def after(accumulated, lane):
        return rotated((accumulated + lane * p2) & MASK) * p1 & MASK

    wanted = after(after(p5, 1), 1)
    before_last = rotated(wanted * pow(p1, -1, 1 << 64) & MASK, 33)
    found, first = [], 0
    while len(found) < count:
        first += 1
        lane = (before_last - after(p5, first)) * inverse & MASK
        signed = lane - (1 << 64) if lane >> 63 else lane
        if abs(signed) < MODULUS and signed != -1:
            found.append((first, signed))
    assert len({*map(hash, found)}) == 1
    return found


def long_ints(count):
    return [number * MODULUS for number in range(1, count + 1)]


def array_map(pairs):
    """Return a map of MessagePack with any keys, which no writer of mpidist makes."""
    header = b"\xdf" + len(pairs).to_bytes(4, "big")
    return header + b"".join(encode(part) for pair in pairs for part in pair)


def as_ext(number):
    return Ext(data_format.INTEGER, number.to_bytes(number.bit_length() // 8 + 1, "little"))


def as_item(key):
    return as_ext(key) if type(key) is int else Ext(data_format.TUPLE, encode(key))


@pytest.mark.parametrize("made", [long_ints, alike_tuples])
@pytest.mark.parametrize("form", ["PAIRS", "ORDERED", "SET", "FROZENSET"])
def test_many_keys_of_one_hash_are_refused(made, form):
    found = [as_item(key) for key in made(COUNT)]
    is_dict = form in ("PAIRS", "ORDERED")
    items = [part for key in found for part in ((key, 0) if is_dict else (key,))]
    content = [items, None] if form == "ORDERED" else items
    bomb = encode([Ext(getattr(data_format, form), encode(content))])
    with pytest.raises(FrameError, match=f"{COUNT} of {COUNT} keys of a dict or set have one hash"):
        data_reader.loads(bomb)


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda bomb: bomb,
        lambda bomb: b"\x92\xc3" + bomb,
        lambda bomb: b"\x81\xa1k" + bomb,
        lambda bomb: encode([Ext(data_format.TUPLE, b"\x91" + bomb)]),
        lambda bomb: encode(dict.fromkeys(range(300), 0))[:-1] + bomb,
    ],
    ids=["alone", "list", "dict", "tuple", "large dict"],
)
@pytest.mark.parametrize("kind", ["arrays", "long ints"])
def test_a_large_map_of_messagepack_has_plain_keys(kind, wrapped):
    if kind == "arrays":
        pairs = [([one, other], 0) for one, other in alike_tuples(1000)]
    else:
        pairs = [(as_ext(number), 0) for number in long_ints(1000)]
    with pytest.raises(FrameError, match="a map of 1000 pairs has keys that are no number"):
        data_reader.loads(wrapped(array_map(pairs)))
    # Few of them cost nothing, whoever has written them.
    assert data_reader.loads(array_map(pairs[:100]))


def test_nested_large_maps_end_at_a_depth():
    data = encode(dict.fromkeys(range(300), 0))
    for _ in range(200):
        data = b"\x91" + data
    with pytest.raises(FrameError, match="maps nested more than 100 deep"):
        data_reader.loads(data)


@pytest.mark.parametrize(
    "honest",
    [
        {number: str(number) for number in range(100_000)},
        {f"key {number}": [number, float(number)] for number in range(100_000)},
        {number << 40: None for number in range(100_000)},
        {(number, number + 1): number for number in range(10_000)},
        {number * 10**30 for number in range(10_000)},
        [{"a": {index: [index] for index in range(1000)}} for _ in range(30)],
        [float(number) / 7 for number in range(100_000)],
        OrderedDict((f"layer.{number}", number) for number in range(5_000)),
        {float(number) * 2.0 ** (61 * power) for number in range(1, 99) for power in range(9)},
    ],
    ids=["ints", "texts", "low bits", "tuples", "set", "nested", "floats", "ordered", "alike"],
)
def test_honest_dicts_and_sets_pass(honest):
    found = data_reader.loads(data_writer.dumps(honest, []))
    assert found == honest and type(found) is type(honest)


def test_the_scan_begins_where_a_large_map_may_be():
    assert not keys._may_hold_large_map(encode(dict.fromkeys(map(str, range(255)), "value")))
    assert keys._may_hold_large_map(encode(dict.fromkeys(map(str, range(256)), "value")))
    assert not keys._may_hold_large_map(encode([1] * 1000))
