"""Incoming message: complete once its receives have ended, and its parts on their devices."""

from __future__ import annotations

import pytest
import torch

from mpidist.comm.transport.incoming import Incoming, nbytes_of


def incoming(parts=()):
    made = Incoming(3, 1, 2, 7, 9, bytearray(b"header"), 1, 6)
    made.parts = parts
    return made


def test_fields_are_those_of_the_eager_message():
    made = incoming()
    assert (made.source, made.kind, made.flags, made.sequence, made.context) == (3, 1, 2, 7, 9)
    assert made.data[made.start : made.end] == b"eader"
    assert made.is_new and made.is_complete and made.damage is None and made.section is None
    made.receives = [("request", 8)]
    assert not made.is_complete


def test_payloads_arrive_once_and_the_current_stream_waits_for_each():
    steps = []

    class Event:
        def block_current_stream(self):
            steps.append("waits")

    def arrive():
        steps.append("copies")
        return [Event(), Event()]

    made = incoming([torch.ones(2), b"bytes"])
    made.arrive = [arrive, arrive]
    made.to_devices()
    assert steps == ["copies", "waits", "waits"] * 2
    made.to_devices()
    assert len(steps) == 6


@pytest.mark.parametrize(
    ("part", "nbytes"),
    [(torch.ones(3, dtype=torch.float64), 24), (b"abc", 3), (bytearray(5), 5),
     (memoryview(b"abcd").cast("h"), 4)],
)  # fmt: skip
def test_a_part_has_a_size_in_bytes(part, nbytes):
    assert nbytes_of(part) == nbytes
