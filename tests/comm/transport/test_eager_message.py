"""Eager messages: several of one message, and sections whose numbers are damaged."""

from __future__ import annotations

import struct

import pytest
import torch

from mpidist.comm.transport import eager_message
from mpidist.comm.transport.eager_message import pack_parts, unpack_parts
from mpidist.comm.transport.incoming import Incoming
from mpidist.errors import FrameError

pytestmark = pytest.mark.mpi(min_size=1)


def test_sections_that_do_not_hold_what_they_announce_are_refused():
    def made(section, payloads=()):
        one = Incoming(0, 1, 0, 0, 0, bytearray(), 0, 0)
        one.section, one.parts = section, [memoryview(payload) for payload in payloads]
        return one

    def damage_of(section, payloads=()):
        unpack_parts(one := made(section, payloads))
        assert not (one.damage and one.parts)
        return one.damage

    section, payloads, _ = pack_parts([b"abc", bytes(20_000), b""], ())
    unpack_parts(whole := made(section, payloads))
    assert [len(part) for part in whole.parts] == [3, 20_000, 0] and whole.damage is None
    for length in range(len(section)):
        assert isinstance(damage_of(section[:length], payloads), FrameError)
    for wrong in ([], [bytes(19_999)], [bytes(20_000)] * 2):
        assert isinstance(damage_of(section, wrong), FrameError)
    for count in (1 << 31, (1 << 32) - 1):
        assert isinstance(damage_of(struct.pack("<I", count)), FrameError)
    assert isinstance(damage_of(struct.pack("<I2Q", 2, 1 << 62, 1 << 62) + bytes(20)), FrameError)
    on_device = made(0)
    on_device.parts = [torch.zeros(20, dtype=torch.uint8)]
    unpack_parts(on_device)
    assert isinstance(on_device.damage, FrameError)


@pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 5000])
@pytest.mark.parametrize("packed", [0, 100, 30_000])
def test_an_eager_message_announces_at_most_so_many_payloads(count, packed):
    """The last of several has the header and what is packed; the sizes are in order."""
    parts = [torch.empty(size, dtype=torch.uint8) for size in range(20_000, 20_000 + count)]
    small = [bytes(packed // 10)] * 10 if packed else []
    devices = [place % 3 or None for place in range(count)] + [None] * len(small)
    numbers = (1, 2, 3, 4, 5)
    messages, payloads = eager_message.encode(numbers, b"header", [*parts, *small], devices)
    sizes, decoded = [], []
    for message in messages:
        assert len(message) <= eager_message.EAGER_BYTES
        fields = eager_message.FIXED.unpack_from(message)
        one, announced = eager_message.decode(9, bytearray(message), fields)
        assert one.damage is None and (fields[0], fields[1], *fields[3:6]) == numbers
        sizes += struct.unpack_from(f"<{announced}Q", message, eager_message.FIXED_BYTES)
        decoded.append(one)
    *earlier, last = decoded
    travels_apart = len(payloads) - count
    assert travels_apart in (0, 1)
    assert len(earlier) == max(0, count + travels_apart - 1) // eager_message.MAX_PAYLOADS
    assert all(one.is_continued and one.start == one.end for one in earlier)
    assert not last.is_continued and last.data[last.start : last.end] == b"header"
    assert (last.section is None) == (not packed) and (last.section == 0) == bool(travels_apart)
    assert sizes[travels_apart:] == [
        part.nbytes | (0 if to is None else to + 1) << eager_message.DEVICE_SHIFT
        for part, to in zip(parts, devices, strict=False)
    ]
    last.parts = [memoryview(payload.numpy() if torch.is_tensor(payload) else payload)
                  for payload in payloads]  # fmt: skip
    if last.section is not None:
        unpack_parts(last)
    assert last.damage is None
    assert [len(part) for part in last.parts] == [
        *(part.nbytes for part in parts), *map(len, small)
    ]  # fmt: skip
