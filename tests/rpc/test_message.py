"""Headers of messages: packed and unpacked; truncated ones and unknown kinds are rejected."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpidist.comm.transport.incoming import Incoming
from mpidist.errors import FrameError
from mpidist.rpc import message
from mpidist.rpc.message import (
    FIRST_ONE_WAY,
    FIRST_RESPONSE,
    Kind,
)
from mpidist.rpc.serving import dispatcher

numbers = st.integers(0, 2**64 - 1)
rows = st.lists(st.tuples(numbers, numbers, st.integers(0, 2**32 - 1)), max_size=20)


@given(rows, rows, st.lists(numbers, max_size=9), st.binary(max_size=300), st.binary(max_size=9))
def test_what_is_written_is_read(references, announced, words, name, ahead):
    offset, data = len(ahead), ahead + message.pack_references(references)
    assert message.unpack_references(data + b"behind", offset) == (references, len(data))
    data = ahead + message.pack_announced(announced)
    assert message.unpack_announced(data + b"behind", offset) == (announced, len(data))
    data = ahead + message.pack_words(words)
    assert message.unpack_words(data + b"behind", offset, len(data)) == tuple(words)
    for count in range(len(words) + 1):
        assert message.unpack_ids(data, offset, len(data), count) == tuple(words[:count])
    pairs = [row[:2] for row in references]
    data = ahead + message.pack_forks(7, pairs)
    assert message.unpack_forks(data, offset, len(data)) == (7, pairs)
    data = ahead + message.COUNT.pack(len(name)) + name
    assert message.unpack_name(data + b"behind", offset, len(data)) == (name, len(data))


def test_every_truncation_is_refused():
    table, announced = (
        message.pack_references([(1, 2, 3)] * 3),
        message.pack_announced([(1, 2, 3)] * 3),
    )
    words, name = message.pack_words((1, 2)), message.COUNT.pack(5) + b"a.b:c"
    for read, data in (
        (lambda data: message.unpack_references(data, 0), table),
        (lambda data: message.unpack_announced(data, 0), announced),
        (lambda data: message.unpack_ids(data, 0, len(data), 2), words),
        (lambda data: message.unpack_name(data, 0, len(data)), name),
        (
            lambda data: message.unpack_gradients(data, 0, len(data)),
            message.GRADIENTS.pack(1, 2, 3, True),
        ),
    ):
        read(data)
        for length in range(len(data)):
            with pytest.raises(FrameError):
                read(data[:length])
    assert (
        message.unpack_pairs(words, 0, 16) == [(1, 2)] and message.unpack_pairs(words, 16, 16) == []
    )
    for length in range(1, len(words)):
        with pytest.raises(FrameError):
            message.unpack_pairs(words, 0, length)
    with pytest.raises(FrameError):
        message.unpack_announced(torch.ones(9, dtype=torch.uint8), 0)  # a part on a device
    for length in set(range(len(words))) - {0, 8}:
        with pytest.raises(FrameError):
            message.unpack_words(words, 0, length)


def test_the_number_of_a_kind_separates_requests_answers_and_one_way_messages():
    requests = {kind for kind in Kind if kind < FIRST_RESPONSE}
    answers = {kind for kind in Kind if FIRST_RESPONSE <= kind < FIRST_ONE_WAY}
    assert answers == {Kind.RESULT, Kind.REMOTE_DONE, Kind.EXCEPTION}
    assert {
        Kind.CALL_PYTHON,
        Kind.REMOTE_SCRIPT,
        Kind.RREF_FETCH,
        Kind.BACKWARD_AUTOGRAD,
    } <= requests
    assert {Kind.RREF_FORK, Kind.LEAVE, Kind.QUIET_REPORT, Kind.GRADIENTS} <= set(
        Kind
    ) - requests - answers
    assert all(0 < kind < 256 for kind in Kind)
    for kind in ("PYTHON", "BUILTIN", "SCRIPT"):
        assert Kind[f"CALL_{kind}"] + message.TO_REMOTE == Kind[f"REMOTE_{kind}"]


def test_unknown_kinds_are_refused():
    with pytest.raises(FrameError, match="unknown kind 200 from rank 3"):
        dispatcher.reject_kind(Incoming(3, 200, 0, 0, 0, bytearray(), 0, 0))
