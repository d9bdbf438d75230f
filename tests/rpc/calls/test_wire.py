"""Whole messages, written and read over a lone process's transport."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.comm.transport.eager_message import HEADER_BYTES
from mpidist.comm.transport.transport import Transport
from mpidist.errors import FrameError
from mpidist.rpc import message
from mpidist.rpc.calls.reader import Reader
from mpidist.rpc.calls.wire import Wire
from mpidist.rpc.message import (
    ANNOUNCED,
    AUTOGRAD,
    FIRST_ONE_WAY,
    FIRST_RESPONSE,
    MAX_REFERENCES,
    REFERENCES,
    Kind,
)
from mpidist.rpc.threads import interceptor
from mpidist.rpc.values import codec
from mpidist.rpc.values.pickles import Reference
from tests.rpc.round_trips import Marked, described
from tests.rpc.values.test_codec import Unreadable
from tests.rpc.values.test_plain_data import mixed

numbers = st.integers(0, 2**64 - 1)


class Held(Reference):
    """A reference with a row of its own."""

    def __init__(self, row):
        self.row = row

    def fork(self, to):
        return self.row


class Numbering:
    """An engine that numbers messages, and sees what leaves and arrives."""

    def __init__(self, number):
        self.number = number
        self.seen = []

    def leaving(self, context, to, tensors, is_answer):
        self.seen.append(("leaving", context, to, is_answer, [tensor.shape for tensor in tensors]))
        return self.number

    def arriving(self, context, source, number, tensors, is_answer):
        self.seen.append(
            ("arriving", context, source, is_answer, [tensor.shape for tensor in tensors])
        )
        assert number == self.number
        return tensors


@pytest.fixture
def wire():
    transport = Transport(None)
    made = Wire(transport, {}, {})
    made.transport, made.announced, made.adopted = transport, [], []

    def make_reference(*row):
        made.adopted.append(row)
        return Held(row)

    made.reader = Reader(None)
    made.reader.make_reference = make_reference
    made.announce = lambda *announced: made.announced.append(announced)
    yield made
    interceptor.register(None)


def sent(wire, obj, prefix=b"", context=0, kind=Kind.CALL_PYTHON, content=None):
    """Send an object to this process; return the message, and the object that it holds."""
    wire.post(0, kind, 7, context, prefix, content or codec.encode(obj))
    incoming = wire.transport.poll()
    assert (incoming.source, incoming.kind, incoming.sequence, incoming.context) == (
        0,
        kind,
        7,
        context,
    )
    if incoming.flags & (AUTOGRAD | REFERENCES):
        wire.reader.unpack_preamble(incoming)  # as the agent does on arrival
    offset = incoming.start
    assert bytes(incoming.data[offset : offset + len(prefix)]) == prefix
    there = wire.reader.decode(
        incoming, offset + len(prefix), FIRST_RESPONSE <= kind < FIRST_ONE_WAY
    )
    return incoming, there


@settings(max_examples=100, deadline=None)
@given(
    obj=mixed | st.sampled_from([b"x" * size for size in (15_000, 31_000, 33_000, 100_000)]),
    prefix=st.binary(max_size=60) | st.just(b"p" * 9000),
    number=st.none() | numbers,
)
def test_messages_of_any_size_come_over(obj, prefix, number):
    made = Wire(transport := Transport(None), {}, {})
    made.transport = transport
    made.reader = Reader(None)
    made.reader.make_reference = lambda reference, fork, owner: Marked(reference)
    engine = Numbering(number)
    interceptor.register(engine if number is not None else None)
    try:
        for kind in (Kind.CALL_PYTHON, Kind.RESULT):
            _, there = sent(made, obj, prefix, 5 if number is not None else 0, kind)
            assert described(there) == described(obj)
            if number is not None:
                leaving = [one for one in engine.seen if one[0] == "leaving"]
                assert len(leaving) == (1 if kind == Kind.CALL_PYTHON else 2)
                assert leaving[-1][3] == (kind == Kind.RESULT)
                arriving = [
                    one
                    for one in engine.seen
                    if one[0] == "arriving" and one[3] == (kind == Kind.RESULT)
                ]
                # Without tensors, or without a number, nothing needs to be attached.
                assert [one[4] for one in arriving] == (
                    [leaving[-1][4]] if number and leaving[-1][4] else []
                )
    finally:
        interceptor.register(None)


@pytest.mark.parametrize("count", [1, MAX_REFERENCES, MAX_REFERENCES + 1, 3000])
@pytest.mark.parametrize("number", [0, 9])
def test_any_number_of_references_travels_once_each(wire, count, number):
    interceptor.register(Numbering(number))
    held = [Held((2**63 + index, 1000 + index, index % 2)) for index in range(count)]
    expected = [one.row for one in held]
    incoming, there = sent(wire, [held, torch.ones(2), held], b"prefix", context=3)
    assert [one.row for one in there[0]] == expected == wire.adopted and there[2] is not None
    assert wire.reader.references_in(incoming) == expected
    assert bool(incoming.flags & ANNOUNCED) == (count > MAX_REFERENCES)
    if count > MAX_REFERENCES:
        # Announced ahead of the message: only the owner's own references, by their forks.
        ((owner, holder, pairs),) = wire.announced
        assert owner == holder == 0 and pairs == [row[:2] for row in expected if row[2] == 0]
    else:
        assert not wire.announced


def test_a_call_without_arguments_has_no_content(wire):
    incoming, there = sent(wire, None, b"name")
    assert there is None and incoming.end - incoming.start == 4
    incoming.flags |= message.FAR
    with pytest.raises(FrameError, match="without its content"):
        wire.reader.decode(incoming, 0, False)


def test_nothing_is_sent_nor_counted_if_a_reference_cannot_travel(wire):
    class Deleted(Held):
        def require_shareable(self):
            raise RuntimeError("deleted")

        def fork(self, to):
            raise AssertionError("counted")

    content = codec.encode([Deleted((1, 2, 3)), Held((4, 5, 6))])
    with pytest.raises(RuntimeError, match="deleted"):
        wire.post(0, Kind.RESULT, 1, 0, b"", content)
    with pytest.raises(RuntimeError, match="deleted"):
        wire.post_one_way(0, Kind.GRADIENTS, b"", content)
    assert wire.transport.poll() is None and wire.one_way_sent == 0


def test_what_is_stopped_sends_no_answers_and_no_one_way_messages(wire):
    wire.is_stopped = True
    wire.answer(0, Kind.RESULT, 1, 0, codec.EMPTY)
    wire.post_one_way(0, Kind.GRADIENTS, b"")
    assert wire.transport.poll() is None and wire.answered == 1 and wire.one_way_sent == 0


def test_the_longest_header_fits(wire):
    room = HEADER_BYTES - 1000
    incoming, there = sent(wire, torch.ones(5000), b"n" * room)
    assert there.sum() == 5000 and incoming.end >= room


def test_references_of_an_unreadable_message_are_made_and_released(wire):
    with pytest.raises(ValueError, match="unreadable"):
        sent(wire, [Unreadable(), Held((1, 2, 3))])
    assert wire.adopted == [(1, 2, 3)]
