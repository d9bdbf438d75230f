"""Log of failed functions: an error is logged where it was raised, a broken call once."""

from types import SimpleNamespace

import pytest

from mpidist.errors import CommTimeout, RankFailureError
from mpidist.rpc.serving import requests
from mpidist.rpc.values.remote_error import RemoteTraceback
from mpidist.rpc.worker import WorkerInfo


@pytest.fixture
def log(caplog, monkeypatch):
    monkeypatch.setattr(requests, "_broken", {})
    monkeypatch.setattr(requests.logger.logger, "propagate", True)
    agent = SimpleNamespace(workers=SimpleNamespace(me=WorkerInfo("w0", 0)))
    request = requests.Request(agent, SimpleNamespace())

    def logged(*errors):
        caplog.clear()
        for error in errors:
            request._log(error)
        return len(caplog.records)

    return logged


def broken(kind, text):
    error = kind(text)
    error.calls = ("w0", "w1, dead")
    return error


def test_an_error_that_came_with_an_answer_is_not_logged_again(log):
    relayed = ValueError("words")
    relayed.__cause__ = RemoteTraceback("text", "w1", 1)
    assert log(relayed) == 0
    assert log(ValueError("words"), ValueError("words")) == 2


def test_a_call_that_breaks_level_by_level_is_logged_once(log, monkeypatch):
    assert log(*(broken(CommTimeout, "f on w1") for _ in range(50))) == 1
    assert log(broken(CommTimeout, "g on w1"), broken(RankFailureError, "h on w1")) == 2
    assert log(CommTimeout("f on w1"), CommTimeout("f on w1")) == 2  # of something else
    monkeypatch.setattr(requests, "_REPEATED_S", 0.0)
    assert log(broken(CommTimeout, "f on w1")) == 1
    assert log(*(broken(CommTimeout, f"{number}") for number in range(300))) == 300
    assert len(requests._broken) <= requests._MOST_TEXTS + 1
