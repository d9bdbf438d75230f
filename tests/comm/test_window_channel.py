"""Headers of the windows' messages: valid ones, and any other bytes."""

import struct

import pytest
import torch

from mpidist.comm import window_channel
from mpidist.comm.mpi import backoff
from mpidist.comm.window_channel import DONE, HEADER_BYTES, PUT, REFUSED, SIGNAL, Header
from mpidist.errors import FrameError
from tests.tools.support import agree


@pytest.mark.parametrize(
    "header", [Header(PUT, 3, 8, 1 << 40), Header(SIGNAL, 1), Header(DONE, (1 << 62) + 1)]
)
def test_a_header_is_read_as_it_was_written(header):
    data = window_channel.encoded(header)
    assert len(data) == HEADER_BYTES
    assert window_channel.decoded(data) == window_channel.decoded(bytearray(data)) == header


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(HEADER_BYTES - 1),
        bytes(HEADER_BYTES + 1),
        struct.pack("<4q", 4, 0, 0, 0),
        struct.pack("<4q", -1, 0, 0, 0),
        struct.pack("<4q", PUT, 1, -8, 4),
        struct.pack("<4q", PUT, 1, 8, 0),
        struct.pack("<4q", PUT, 1, 8, -4),
        struct.pack("<4q", SIGNAL, -1, 0, 0),
    ],
)
def test_other_bytes_are_refused(data):
    with pytest.raises(FrameError, match="window"):
        window_channel.decoded(data)


def dropped(texts):
    return [text for text in texts if "is dropped" in text]


@pytest.mark.mpi(min_size=2)
def test_messages_that_are_none_change_nothing(group, logged):
    """Sent past the library, on the windows' own communicator."""
    whole = torch.full((30,), -1.0)
    window = group.window(whole[10:20])
    channel = window._channel_of_group()
    number = window._registered.exposed.number
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    bad = [
        b"",
        b"x" * 100,
        struct.pack("<4q", 9, number, 0, 0),
        struct.pack("<4q", SIGNAL, number + 5, 0, 0),
        struct.pack("<4q", DONE, number, 0, 0),
        struct.pack("<4q", PUT, number, 36, 0),
        struct.pack("<4q", PUT, number, -4, 0),
    ]
    requests = [
        channel._mpi.Isend((data, len(data), window_channel.MPI.BYTE), right, 1) for data in bad
    ]

    def until(is_true):
        backoff.until(lambda: channel.match() is not None and is_true(), timeout_s=20)

    # The last of them is one that is dropped.
    until(lambda: len(dropped(logged)) == 5)
    group.barrier()
    # A put past the end of the window, with its data; it is refused.
    refused = window_channel.Put(channel, window._registered.exposed, "a put", right)
    channel._unanswered[right].append(refused)
    values = torch.ones(2)
    for data in (struct.pack("<4q", PUT, number, 36, 8), values.numpy().tobytes()):
        tag = 1 if len(data) == HEADER_BYTES else window_channel._DATA
        requests.append(channel._mpi.Isend((data, len(data), window_channel.MPI.BYTE), right, tag))
    until(lambda: refused.answer is not None)
    window.put(torch.full((10,), 2.0), right)
    window.signal(right)
    window.wait_signal(left)
    group.barrier()
    expected = torch.full((30,), -1.0)
    expected[10:20] = 2
    for request in requests:
        request.Wait()
    ok = torch.equal(whole, expected) and refused.answer == REFUSED
    window.tensor_deregister()
    agree(group, ok and len(dropped(logged)) == 5, f"{whole}")
