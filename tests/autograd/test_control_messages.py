"""Counts of the engine's messages."""

from types import SimpleNamespace

import pytest

from mpidist.autograd import control_messages
from mpidist.autograd.control_messages import Notice
from mpidist.errors import RankFailureError
from mpidist.rpc import current


@pytest.fixture
def sent(monkeypatch):
    """Return the ranks that notices go to; rank 2 has left."""
    ranks = []

    def send(to, *rest):
        if to == 2:
            raise RankFailureError("rank 2 has left", [2])
        ranks.append(to)

    agent = SimpleNamespace(engine_messages=SimpleNamespace(send=send))
    monkeypatch.setattr(current, "require", lambda: agent)
    monkeypatch.setattr(control_messages, "counts", type(control_messages.counts)())
    return ranks


def test_notices_that_were_sent_are_counted(sent):
    control_messages.notify_all([1, 2, 3], Notice.STOP, 7, 1)
    assert sent == [1, 3] and control_messages.counts["STOP"] == 2
    with pytest.raises(RankFailureError):
        control_messages.notify(2, Notice.DONE, 7)
