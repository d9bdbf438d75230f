"""Eager messages: sections and joined parts whose numbers are damaged."""

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


def test_damaged_numbers_of_joined_parts_are_refused(monkeypatch):
    monkeypatch.setattr(eager_message, "MAX_PAYLOADS", 2)
    parts = [torch.full((size,), size % 251, dtype=torch.uint8) for size in (3, 700, 200, 5)]
    section, payloads, devices = pack_parts(parts, [0, 0, 0, 0])
    assert [part.nbytes for part in payloads] == [700, 512] and devices == [0, 0]

    def unpacked(section, payloads=payloads):
        one = Incoming(0, 1, 0, 0, 0, bytearray(), 0, 0)
        one.section, one.parts = section, payloads
        unpack_parts(one)
        assert not (one.damage and one.parts)
        return one

    whole = unpacked(section)
    whole.to_devices()
    assert [part.tolist() for part in whole.parts] == [part.tolist() for part in parts]
    assert all(
        isinstance(unpacked(section[:end]).damage, FrameError) for end in range(len(section))
    )
    for place in range(4, len(section)):
        for bit in range(8):
            damaged = bytearray(section)
            damaged[place] ^= 1 << bit
            one = unpacked(damaged)
            # A part of another size within the same 128 bytes cannot be told from a right one.
            assert one.damage is not None or sum(part.nbytes for part in one.parts) <= 700 + 512
    assert isinstance(unpacked(section, payloads[:1]).damage, FrameError)
    assert isinstance(unpacked(section, [*payloads, payloads[0]]).damage, FrameError)
    assert isinstance(unpacked(section, [payloads[0], payloads[1][:256]]).damage, FrameError)
