"""Format of a recorder's file: its sizes, and what its writer and its reader rely on."""

from __future__ import annotations

import struct

import pytest

from mpidist.comm.recorder import file_format
from mpidist.comm.recorder.recording import Kind


def test_sizes_and_kinds():
    assert file_format.SLOT.size == file_format.SLOT_BYTES == 64
    assert file_format.BEGUN.size == 64
    assert file_format.HEADER.size <= file_format.HEADER_BYTES
    assert file_format.file_bytes(4096, 64, 100) == 4096 + 4160 * 64 + 100
    assert tuple(map(str, Kind)) == file_format.KINDS


def test_python_clears_a_slot_before_it_fills_it():
    # The reader relies on it: a slot that is half written has no number, one that begins no end.
    slot = bytearray(b"\xff" * 64)
    with pytest.raises(struct.error):
        file_format.BEGUN.pack_into(slot, 0, 1, 3, 4, 5, 6, 7, 8, "no number")
    assert slot[56:] == bytes(8) and slot[:16] == (1).to_bytes(8, "little") + bytes(8)
