"""The agent of this process; pure."""

import pytest

from mpidist.errors import MpidistError
from mpidist.rpc import current


def test_the_agent_is_returned_or_its_absence_explained(monkeypatch):
    monkeypatch.setattr(current, "agent", None)
    with pytest.raises(MpidistError, match=r"Call mpidist\.rpc\.init_rpc first"):
        current.require()
    monkeypatch.setattr(current, "absence", "RPC was shut down.")
    with pytest.raises(MpidistError, match="was shut down"):
        current.require()
    agent = object()
    monkeypatch.setattr(current, "agent", agent)
    assert current.require() is agent
