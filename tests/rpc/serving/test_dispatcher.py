"""Damaged messages, which the dispatcher rejects with a reason; the sender's call alone fails."""

from __future__ import annotations

import struct

import pytest
import torch

import mpidist.rpc as rpc
from mpidist.errors import FrameError, MpidistError, RRefError
from mpidist.rpc import api, message
from mpidist.rpc.message import ANNOUNCED, AUTOGRAD, FAR, REFERENCES, Kind
from mpidist.rpc.rref_store import new_id
from mpidist.rpc.threads.call import Call
from mpidist.rpc.values import codec
from tests.rpc.limits import CALL_S, limit_of_tests, soon
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=2)
_limit = limit_of_tests(100)

NAME = b"operator:add"
NAMED = message.COUNT.pack(len(NAME)) + NAME
PAIR = message.PAIR.pack(5, 6)
NO_WORKER = message.pack_references([(1, 2, 0), (1, 2, 77)])
SECTION = struct.pack("<IQ", 1, 1 << 40)


def echo(x=None):
    return x


# Name: (kind, flags, header, parts, context, text in the receiver's log). One-way messages that are
# counted for quiescence are counted by the sender as well.
MESSAGES = {
    "an empty report": (Kind.QUIET_REPORT, 0, b"", (), 0, "a report of 0 numbers"),
    "a short report": (
        Kind.QUIET_REPORT,
        0,
        message.pack_words([0, 1]),
        (),
        0,
        "a report of 2 numbers",
    ),
    "half a number": (Kind.QUIET_REPORT, 0, b"1234", (), 0, "no row of numbers"),
    "a verdict of somebody": (
        Kind.QUIET_VERDICT,
        0,
        message.pack_words([0, 1]),
        (),
        0,
        "a verdict",
    ),
    "an empty verdict": (Kind.QUIET_VERDICT, 0, b"", (), 0, "a verdict of 0 numbers"),
    "forks in odd number": (
        Kind.RREF_FORK,
        0,
        message.pack_words([1, 2, 3, 4]),
        (),
        0,
        "no row of pairs",
    ),
    "deletes in odd number": (
        Kind.RREF_USER_DELETE,
        0,
        message.pack_words([1, 2, 3]),
        (),
        0,
        "no row of pairs",
    ),
    "forks cut off": (Kind.RREF_FORK, 0, bytes(8) + PAIR[:-1], (), 0, "no row of pairs"),
    "forks that another has made": (
        Kind.RREF_FORK,
        0,
        message.pack_forks(0, [(5, 77 << 40)]),
        (),
        0,
        "which it has not made",
    ),
    "forks for nobody": (Kind.RREF_FORK, 0, b"", (), 0, "1 numbers announced"),
    "forks for no worker": (Kind.RREF_FORK, 0, message.pack_forks(77, []), (), 0, "rank 77, of"),
    "references cut off": (
        Kind.CALL_PYTHON,
        REFERENCES,
        b"\xff\xff",
        (),
        0,
        "65535 references announced",
    ),
    "no references": (Kind.CALL_PYTHON, REFERENCES, b"", (), 0, "references are cut off"),
    "a reference of no worker": (
        Kind.CALL_PYTHON,
        REFERENCES,
        NO_WORKER + NAMED,
        (),
        0,
        "a value of rank 77",
    ),
    "no number of autograd": (Kind.CALL_PYTHON, AUTOGRAD, b"12", (), 0, "1 numbers announced"),
    "a remote call without ids": (Kind.REMOTE_PYTHON, 0, PAIR[:-1], (), 0, "2 numbers announced"),
    "a fetch of nothing": (Kind.RREF_FETCH, 0, b"", (), 0, "1 numbers announced"),
    "an unknown request": (17, 0, b"", (), 0, "unknown kind 17"),
    "an unknown answer": (47, 0, b"", (), 0, "unknown kind 47"),
    "an unknown one-way message": (99, 0, b"", (), 0, "unknown kind 99"),
    "no kind": (0, 0, b"", (), 0, "unknown kind 0"),
    "an answer to nobody of a part": (Kind.RESULT, FAR | ANNOUNCED, b"", [b"12"], 0, None),
    "an answer of references of no worker": (
        Kind.RESULT,
        REFERENCES,
        NO_WORKER,
        (),
        0,
        "a value of rank 77",
    ),
    "gradients without numbers": (Kind.GRADIENTS, 0, b"12", (), 0, None),
    "a notice that is none": (Kind.AUTOGRAD_NOTICE, 0, b"\xff", (), 0, None),
}


def is_counted(kind):
    return kind in (Kind.RREF_FORK, Kind.RREF_USER_DELETE, Kind.GRADIENTS, Kind.AUTOGRAD_NOTICE)


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_that_nobody_sends_ends_no_worker(group, workers, to, name, logged):
    """Rank 0 sends, all others receive; afterwards all workers answer and shut down."""
    kind, flags, header, parts, context, reason = MESSAGES[name]
    agent = api._get_current_rpc_agent()
    if group.rank == 0:
        for other in range(1, group.size):
            if is_counted(kind):
                agent.wire.one_way_sent += 1
            agent.dispatcher._transport.send(
                other, int(kind), 1 << 50, context, flags, header, parts
            )
    is_logged = (
        group.rank == 0
        or reason is None
        or soon(lambda: any(reason in text for text in logged), CALL_S)
    )
    agree(group, is_logged, f"the log: {logged}")
    assert rpc.rpc_sync(to, echo, args=(5,), timeout=CALL_S) == 5


OF_ANOTHER = [(1, 77 << 40, 0)]  # no fork of the sender's
REQUESTS = {
    "a reference with another's fork": (
        *(
            Kind.CALL_PYTHON,
            REFERENCES,
            message.pack_references(OF_ANOTHER) + NAMED,
            (),
            "which it has not made",
        ),
    ),
    "a reference with another's fork, and a part that is late": (
        *(
            Kind.CALL_PYTHON,
            REFERENCES | FAR,
            message.pack_references(OF_ANOTHER) + NAMED,
            [b"x" * (1 << 20)],
        ),
        "which it has not made",
    ),
    "announced references with another's forks": (
        *(Kind.CALL_PYTHON, FAR | ANNOUNCED, NAMED),
        *(
            [message.pack_announced(OF_ANOTHER) + codec.encode(1).skeleton],
            "which it has not made",
        ),
    ),
    "a remote call with another's reference": (
        Kind.REMOTE_PYTHON,
        0,
        message.PAIR.pack(77 << 40, 1) + NAMED,
        (),
        "not made",
    ),
    "an unknown kind": (17, 0, b"", (), "unknown kind 17"),
    "a reference of no worker": (
        Kind.CALL_PYTHON,
        REFERENCES,
        NO_WORKER + NAMED,
        (),
        "a value of rank 77",
    ),
    "announced references of no worker": (
        *(Kind.CALL_PYTHON, FAR | ANNOUNCED, NAMED),
        lambda rank: [
            message.pack_announced([(1, new_id(rank, 2), 77)]) + codec.encode(1).skeleton
        ],
        "a value of rank 77",
    ),
    "announced references cut off": (
        Kind.CALL_PYTHON,
        FAR | ANNOUNCED,
        NAMED,
        [struct.pack("<I", 1 << 31)],
        "references announced",
    ),
    "a table of nothing": (
        Kind.CALL_PYTHON,
        codec.TABLE,
        NAMED + struct.pack("<II", 1, 0),
        (),
        "does not describe",
    ),
    "a remote call without ids": (Kind.REMOTE_PYTHON, 0, PAIR[:-1], (), "2 numbers announced"),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_that_cannot_be_read_fails_its_call_with_the_reason(group, workers, to, name):
    kind, flags, header, parts, reason = REQUESTS[name]
    parts = parts(group.rank) if callable(parts) else parts
    agent = api._get_current_rpc_agent()
    rank = agent.workers.rank_of(to)
    call = Call(rank, "the call", CALL_S)
    post = agent.calls._post
    try:
        agent.calls._post = lambda to, _, sequence, *rest: agent.dispatcher._transport.send(
            to, int(kind), sequence, 0, flags, header, parts
        )
        agent.calls.start(call, int(Kind.CALL_PYTHON), b"", codec.EMPTY)
    finally:
        agent.calls._post = post
    with pytest.raises(FrameError, match=reason):
        agent.calls.result(call)
    assert rpc.rpc_sync(to, echo, args=(5,), timeout=CALL_S) == 5


def forge_answer(rank, sequence, kind, is_damaged):
    """Answer, from this worker, a call between two other workers."""
    agent = api._get_current_rpc_agent()
    agent.dispatcher._transport.send(
        rank,
        kind,
        sequence,
        0,
        0 if not is_damaged else REFERENCES,
        b"" if is_damaged else b"i\1\0\0\0",
    )


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize(
    ("kind", "is_damaged"), [(Kind.RESULT, False), (Kind.EXCEPTION, False), (Kind.RESULT, True)]
)
def test_nobody_answers_for_another(group, workers, kind, is_damaged):
    me, callee, third = (workers[(group.rank + step) % group.size] for step in range(3))
    agent = api._get_current_rpc_agent()
    kept = rpc.remote(callee, torch.ones, args=(3,), timeout=CALL_S)
    call = Call(agent.workers.rank_of(callee), "the call", CALL_S)
    agent.calls.started = call.sequence = next(agent.calls._numbers)
    agent.calls._pending[call.sequence] = call
    rpc.rpc_sync(
        third, forge_answer, args=(group.rank, call.sequence, int(kind), is_damaged), timeout=CALL_S
    )
    rpc.rpc_sync(third, echo, timeout=CALL_S)  # behind it, in the same order
    assert not call.done and agent.calls._pending.pop(call.sequence) is call
    assert kept.to_here(timeout=CALL_S).sum() == 3 and me


def test_what_raises_unforeseen_fails_its_call_alone(group, workers, to, monkeypatch, logged):
    agent = api._get_current_rpc_agent()

    def fail(incoming):
        raise ZeroDivisionError("a fault of ours")

    handlers = list(agent.dispatcher._handlers)
    handlers[Kind.BACKWARD_AUTOGRAD] = fail
    monkeypatch.setattr(agent.dispatcher, "_handlers", handlers)
    group.barrier()
    with pytest.raises(MpidistError, match=r"cannot be taken up.*a fault of ours"):
        agent.calls.request(
            agent.workers.rank_of(to), Kind.BACKWARD_AUTOGRAD, b"", None, CALL_S, "a pass"
        )
    assert rpc.rpc_sync(to, echo, args=(5,), timeout=CALL_S) == 5
    group.barrier()
    assert any("Traceback" in text and "in fail" in text for text in logged)


def test_a_creation_whose_error_cannot_be_read_ends_no_thread(group, workers, to, monkeypatch):
    agent = api._get_current_rpc_agent()
    group.barrier()

    def unreadable(call):
        raise FrameError("no error can be read")

    monkeypatch.setattr(agent.calls, "_error_of", unreadable)
    kept = rpc.remote(to, len, args=(5,), timeout=CALL_S)
    with pytest.raises((FrameError, RRefError), match="can be read"):
        kept._get_future().wait()
    assert rpc.rpc_sync(to, echo, args=(5,), timeout=CALL_S) == 5
