"""Letters keep the order of each pair, and bring parts of any size; all may send to all at once."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from mpidist.comm import buffer, device_messages
from mpidist.comm import mailbox as module
from mpidist.comm.mailbox import LETTER_BYTES, Mailbox, envelope_bytes
from tests.comm.lazy_device import LazyDevice
from tests.support import agree

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


@pytest.mark.parametrize("aware", ["0", "1"])
def test_a_part_for_a_device_waits_for_no_work_of_users(monkeypatch, group, mailbox, aware):
    """Whoever polls has users' current stream: what was queued there must not delay the messages of all other calls."""
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", aware)
    device = LazyDevice(None)
    monkeypatch.setattr(device_messages, "device_at", lambda where: device)
    monkeypatch.setattr(buffer, "is_direct", lambda tensor: False)
    used = []
    monkeypatch.setattr(module, "used_here", used.append)
    if group.size > 1:
        data = torch.arange(3000, dtype=torch.int16).view(torch.uint8)
        monkeypatch.setattr(device_messages, "device_of", lambda tensors: None)
        mailbox.send((group.rank + 1) % group.size, letter(b"x", 1), [data.numpy()], [0])
        slow = []
        device.current().do(lambda: slow.append("users' kernel"))
        (arrival,) = receive(mailbox, 1)
        agree(group, not slow, "the receiving thread waited for the user's stream")
        arrival.bring()
        device.current().record().synchronize()
        agree(group, arrival.parts[0].tolist() == data.tolist(), "the part")
        agree(group, not device.strays, "work is queued while another device is current")
        agree(group, [id(part) for part in used] == [id(part) for part in arrival.parts], "its memory is let go too early")
    group.barrier()


def test_a_part_to_oneself_comes_behind_the_stream_that_copies_it(monkeypatch, group, mailbox):
    device = LazyDevice(None)
    monkeypatch.setattr(module, "device_at", lambda where: device)
    copied = []

    def to(tensor, where, copy):
        device.current().do(lambda: copied.append(True))
        return tensor.clone()

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(torch.Tensor, "to", to)
        mailbox.send(group.rank, letter(b"x", 1), [torch.ones(4, dtype=torch.uint8)], [0])
    arrival = mailbox.poll()
    device.leave_default_stream()  # another thread's stream
    arrival.bring()
    assert not copied
    device.current().record().synchronize()
    assert copied


def test_alone_needs_no_mpi():
    mailbox = Mailbox(None)
    mailbox.send(0, letter(b"to myself", 1), [b"part"])
    arrival = mailbox.poll()
    assert arrival.source == 0 and bytes(arrival.parts[0]) == b"part" and mailbox.poll() is None
