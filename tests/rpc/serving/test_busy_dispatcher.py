"""Dispatcher that finds a message at every poll: deletes and timeouts do not wait; without MPI."""

from collections import deque
from types import SimpleNamespace

import pytest

from mpidist.rpc.message import Kind
from mpidist.rpc.serving.dispatcher import _MOST_MESSAGES, Dispatcher
from mpidist.rpc.threads.pool import HANDLED


class Parts:
    """An agent's parts, which count what they are asked for."""

    def __init__(self):
        self.deletes = deque()
        self.sent = []
        self.is_late = False
        self.expired = 0

    def flush_deletes(self):
        self.sent.append(list(self.deletes))
        self.deletes.clear()

    def has_expired(self):
        return self.is_late

    def expire(self):
        self.expired += 1

    def complete(self, incoming):
        return HANDLED


@pytest.fixture
def parts():
    return Parts()


@pytest.fixture
def transport():
    answer = SimpleNamespace(kind=int(Kind.RESULT), is_new=False, receives=0, damage=None)
    return SimpleNamespace(poll=lambda tests: answer, peek=None)


@pytest.fixture
def dispatcher(parts, transport):
    dispatcher = Dispatcher(transport)
    dispatcher.connect(SimpleNamespace(calls=parts, references=parts))
    return dispatcher


def test_deletes_and_timeouts_do_not_wait_for_a_poll_without_a_message(dispatcher, parts):
    parts.deletes.extend([(1, 2, 3), (1, 2, 4)])
    parts.is_late = True
    for _ in range(_MOST_MESSAGES):
        assert dispatcher.poll(1) is HANDLED
    assert not parts.sent and not parts.expired
    assert dispatcher.poll(1) is HANDLED
    # What came together is one message.
    assert parts.sent == [[(1, 2, 3), (1, 2, 4)]] and parts.expired == 1


def test_a_poll_without_a_message_does_what_is_due_at_once(dispatcher, parts, transport):
    dispatcher._receive = lambda tests: None
    parts.deletes.append((1, 2, 3))
    assert dispatcher.poll(1) is HANDLED and parts.sent == [[(1, 2, 3)]]
    assert dispatcher.poll(1) is None
    parts.is_late = True
    assert dispatcher.poll(1) is None and parts.expired == 1
