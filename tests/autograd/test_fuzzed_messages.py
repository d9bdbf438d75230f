"""Random sequences of nearly valid messages: all refused or handled; the engine stays usable."""

from __future__ import annotations

from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.autograd.context import SMART, Context
from mpidist.autograd.control_messages import Notice
from mpidist.errors import FrameError
from mpidist.rpc import current
from mpidist.rpc.message import Kind
from tests.autograd.hostile import (
    ME,
    MESSAGE,
    NOBODYS,
    OWN,
    PEER,
    PEERS,
    WORKERS,
    Outbox,
    agent,
    give,
    make_engine,
    right,
    running,
)

_KEYS = [
    ME << 48 | 21,
    ME << 48 | 21 | SMART,
    PEER << 48 | 33,
    PEER << 48 | 33 | SMART,
    2 << 48 | 5 | SMART,
    NOBODYS,
    0,
]
_RANKS = [0, 1, 2, 3, -1, 1 << 65, True, "1"]
_plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda some: (
        st.lists(some, max_size=3)
        | st.lists(some, max_size=3).map(tuple)
        | st.dictionaries(st.integers(), some, max_size=2)
    ),
    max_leaves=6,
)
_numbers = st.sampled_from([MESSAGE, 12, 0, -1, 1 << 65])
_ranks = st.lists(st.sampled_from(_RANKS[:3]) | st.sampled_from(_RANKS), max_size=3).map(tuple)
_hops = st.lists(st.tuples(_numbers, st.sampled_from(_RANKS)), max_size=3)
_rest = {
    Notice.DONE: st.tuples(_ranks),
    Notice.FAILED: st.tuples(st.just(("E", "E: text", "text", None)) | _plain),
    Notice.SUMMARY: st.tuples(st.dictionaries(_numbers, _hops, max_size=3), _ranks),
    Notice.AWAIT: st.tuples(st.booleans(), st.lists(_numbers, max_size=3).map(tuple)),
    Notice.REPORT: st.tuples(st.floats(), st.lists(st.text(max_size=3), max_size=2), _ranks),
}
_contexts = st.sampled_from([OWN, OWN, OWN, PEERS, 8, NOBODYS, 0])
_tensors = st.sampled_from(
    [
        *right(),
        None,
        torch.ones(3),
        torch.ones(2, 3, dtype=torch.int8),
        torch.ones(2, 3).to_sparse(),
        "text",
    ]
)
_gradients = st.tuples(
    st.just(int(Kind.GRADIENTS)),
    st.tuples(
        _contexts,
        st.sampled_from(_KEYS),
        st.just(MESSAGE) | _numbers,
        st.integers(0, 255),
        st.lists(_tensors, max_size=3),
    ),
)


@st.composite
def _notices(draw):
    what = draw(st.sampled_from(list(Notice)))
    key = () if what in (Notice.CLEANUP, Notice.ADOPT) else (draw(st.sampled_from(_KEYS)),)
    rest = draw(_rest[what]) if what in _rest else ()
    content = [int(what), draw(_contexts), *key, *rest]
    if draw(st.integers(0, 3)) == 0:
        content[draw(st.integers(0, len(content) - 1))] = draw(_plain)
    return int(Kind.AUTOGRAD_NOTICE), tuple(content)


_messages = st.tuples(
    st.sampled_from([PEER, PEER, 2, ME]), _notices() | _gradients | st.tuples(st.just(65), _plain)
)


@settings(max_examples=150, deadline=None)
@given(st.lists(_messages, max_size=12), st.sampled_from([0, SMART]))
def test_random_sequences_of_nearly_valid_messages_leave_the_engine_usable(messages, mode):
    outbox = Outbox()
    with mock.patch.object(current, "agent", agent(outbox)):
        engine = make_engine()
        engine.contexts._contexts[PEERS] = Context(PEERS)
        under_way = running(engine, mode)
        for source, (kind, content) in messages:
            try:
                action = engine.handle_one_way(source, kind, 0, content)
                if action is not None:
                    action.run()
            except FrameError:
                pass
        context = engine.contexts.require(OWN)
        assert under_way.mentioned <= set(range(WORKERS))
        assert (
            len(context.plans) <= 64
            and list(context.sends) == [MESSAGE]
            and {PEER} <= context.callees <= set(range(WORKERS))
        )
        for gradient in context.gradients.all().values():
            assert gradient.shape == (2, 3) and gradient.dtype is torch.float32
        # A valid message among them may have begun a pass that freed the graph.
        context.sends = make_engine().contexts.require(OWN).sends
        give(engine, PEER, right(), key=PEER << 48 | 34)
        assert outbox.sent[-1] == (PEER, (Notice.DONE, OWN, PEER << 48 | 34, ()))
