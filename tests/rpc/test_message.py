"""A message as a letter and back; whatever is cut off or unknown is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.comm import mailbox
from mpidist.errors import FrameError
from mpidist.rpc import message
from mpidist.rpc.message import Content, Header, Kind

numbers = st.integers(0, 2**64 - 1)


def as_bytes(part):
    return part.numpy().tobytes() if isinstance(part, torch.Tensor) else bytes(part)


def carried(header, content):
    """Write a message, carry its letter and parts over, and read it."""
    letter, parts, devices = message.written(header, content)
    assert len(letter) <= mailbox.LETTER_BYTES
    mailbox._write_envelope(letter, parts, devices)
    there = [
        memoryview(bytearray(bytes(part) if not isinstance(part, torch.Tensor) else part.numpy().tobytes())) for part in parts
    ]
    read = message.header_of(memoryview(letter))
    return read, message.content_of(read, memoryview(letter), there)


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(sorted(message.KINDS)),
    sequence=numbers,
    ids=st.lists(numbers, max_size=6),
    forks=st.lists(st.tuples(numbers, numbers), max_size=message.MAX_FORKS),
    outer=st.none() | st.tuples(st.sampled_from([Kind.FORWARD_AUTOGRAD]), st.lists(numbers, max_size=3).map(tuple)),
    pickled=st.binary(max_size=40) | st.just(bytes(40_000)),
    table=st.binary(max_size=30),
    parts=st.lists(st.binary(max_size=2000) | st.integers(0, 5000), max_size=30),
)
def test_what_is_written_is_read(kind, sequence, ids, forks, outer, pickled, table, parts):
    header = Header(kind, 7, sequence, tuple(ids), forks, outer)
    made = [part if isinstance(part, bytes) else torch.arange(part).to(torch.uint8) for part in parts]
    read, content = carried(header, Content(pickled, table, made))
    assert (read.kind, read.generation, read.sequence, tuple(read.ids)) == (kind, 7, sequence, tuple(ids))
    assert list(read.forks) == forks and read.outer == outer
    assert bytes(content.pickled) == pickled and bytes(content.table) == table
    assert [bytes(part) for part in content.parts] == [
        part if isinstance(part, bytes) else part.numpy().tobytes() for part in made
    ]


def read_all(letter, parts):
    return message.content_of(message.header_of(letter), letter, parts)


def test_small_parts_begin_at_multiples_of_16():
    letter, parts, devices = message.written(Header(1, 1), Content(b"x", b"", [b"abc", b"defg"]))
    mailbox._write_envelope(letter, parts, devices)
    assert letter.index(b"abc") % 16 == 0 and letter.index(b"defg") % 16 == 0


@pytest.mark.parametrize(
    "content",
    [Content(b"pickle"), Content(b"pickle", b"table", [b"abc", torch.zeros(9, dtype=torch.uint8)]), Content(bytes(50_000))],
)
def test_truncated_letters_are_refused(content):
    letter, parts, devices = message.written(Header(Kind.CALL_PYTHON, 1, 2, (3, 4), [(5, 6)]), content)
    mailbox._write_envelope(letter, parts, devices)
    there = [memoryview(bytearray(as_bytes(part))) for part in parts]
    for length in range(len(letter)):
        with pytest.raises(FrameError):
            read_all(memoryview(letter)[:length], there)
    if there:
        with pytest.raises(FrameError):
            message.content_of(message.header_of(memoryview(letter)), memoryview(letter), there[:-1])


def test_unknown_letters_are_refused():
    letter, _, _ = message.written(Header(Kind.CALL_PYTHON, 1), Content(b"x"))
    start = mailbox.envelope_bytes(0)
    for place, value, words in ((start, 0, "starts with"), (start + 2, 99, "version 99"), (start + 3, 200, "unknown kind 200")):
        broken = bytearray(letter)
        broken[place] = value
        with pytest.raises(FrameError, match=words):
            message.header_of(memoryview(broken))
