"""Letters keep the order of each pair, and bring parts of any size; all may send to all at once."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from mpidist.comm import buffer
from mpidist.comm.mailbox import LETTER_BYTES, Mailbox, envelope_bytes

pytestmark = pytest.mark.mpi(min_size=1)


def letter(text, parts=0):
    return bytearray(envelope_bytes(parts)) + text


def receive(mailbox, count, limit_s=30):
    """Return the first sight of ``count`` letters, in their order, all complete."""
    seen, deadline = [], time.monotonic() + limit_s
    while (len(seen) < count or not all(one.is_complete for one in seen)) and time.monotonic() < deadline:
        arrival = mailbox.poll()
        if arrival is not None and arrival.note is None:
            arrival.note = "seen"
            seen.append(arrival)
    assert len(seen) == count and all(one.is_complete for one in seen)
    return seen


def texts(arrivals, source):
    return [bytes(one.letter[envelope_bytes(len(one.parts)) :]) for one in arrivals if one.source == source]


@pytest.fixture
def mailbox(group):
    made = Mailbox(group)
    yield made
    group.barrier()
    made.close(1)


def test_letters_and_parts_all_to_all_at_once(group, mailbox):
    sizes = [0, 1, 4095, 70_000, 3_000_000]
    for turn in range(4):
        for to in range(group.size):
            mailbox.send(to, letter(b"small %d" % turn))
            parts = [torch.full((size,), (turn + group.rank) % 256, dtype=torch.uint8) for size in sizes]
            mailbox.send(to, letter(b"large %d" % turn, len(sizes)), parts)
            mailbox.send(to, letter(b"%d" % turn, 1), [bytes([group.rank]) * 10])
    arrivals = receive(mailbox, 12 * group.size)
    for source in range(group.size):
        expected = [words for turn in range(4) for words in (b"small %d" % turn, b"large %d" % turn, b"%d" % turn)]
        assert texts(arrivals, source) == expected
    for one in arrivals:
        if len(one.parts) == len(sizes):
            turn = int(bytes(one.letter).split()[-1])
            assert [len(part) for part in one.parts] == sizes
            assert all((np.frombuffer(part, np.uint8) == (turn + one.source) % 256).all() for part in one.parts)
        elif one.parts:
            assert bytes(one.parts[0]) == bytes([one.source]) * 10


def test_parts_beyond_what_mpi_counts_travel_in_pieces(group, mailbox, monkeypatch):
    monkeypatch.setattr(buffer, "MAX_COUNT", 1000)
    data = torch.arange(10_000, dtype=torch.int16).view(torch.uint8)
    mailbox.send((group.rank + 1) % group.size, letter(b"x", 1), [data])
    (arrival,) = receive(mailbox, 1)
    assert bytes(arrival.parts[0]) == data.numpy().tobytes()
    group.barrier()


def test_the_longest_letter_travels_and_a_longer_one_is_refused(group, mailbox):
    text = bytes(range(256)) * ((LETTER_BYTES - 16) // 256)
    mailbox.send((group.rank + 1) % group.size, letter(text))
    (arrival,) = receive(mailbox, 1)
    assert bytes(arrival.letter[16:]) == text
    with pytest.raises(ValueError, match="at most"):
        mailbox.send(0, letter(bytes(LETTER_BYTES)))
    group.barrier()


def test_alone_needs_no_mpi():
    mailbox = Mailbox(None)
    mailbox.send(0, letter(b"to myself", 1), [b"part"])
    arrival = mailbox.poll()
    assert arrival.source == 0 and bytes(arrival.parts[0]) == b"part" and mailbox.poll() is None
