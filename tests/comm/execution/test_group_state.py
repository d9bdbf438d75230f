"""State of a group: who is in it, closed or failed, and the errors of its callers; without MPI."""

import threading
from types import SimpleNamespace

import pytest

from mpidist.comm.execution import group_state
from mpidist.comm.execution.group_settings import RAISE, GroupSettings
from mpidist.comm.execution.group_state import GroupState, open_groups
from mpidist.errors import CommTimeout, GroupError
from mpidist.weak_registry import WeakRegistry


@pytest.fixture
def state():
    comm = SimpleNamespace(rank=1, size=4, plain=SimpleNamespace(), children=list)
    return GroupState(comm, GroupSettings("test", "key", (10, 11, 12, 13), 600))


def test_world_ranks_that_a_message_needs(state):
    assert state.peers_of(2) == (12,)
    assert state.peers_of(None) == (10, 12, 13)


def test_the_first_failure_is_raised_by_every_later_call(state):
    closed = []
    state.close_fast_path = lambda: closed.append(1)
    state.require_usable("scatter")
    state.fail(CommTimeout("the first reason"))
    state.fail(CommTimeout("the second"))
    raised = []
    for _ in range(2):
        with pytest.raises(CommTimeout, match="the first reason") as caught:
            state.require_usable("scatter")
        raised.append(caught.value)
    # A copy each time, or the frames of all callers would pile up.
    assert raised[0] is not raised[1] and closed == [1, 1]


def test_a_closed_group_names_the_refused_call_and_is_not_revoked(state):
    revoked = []
    state.mpi = SimpleNamespace(Revoke=lambda: revoked.append(1))
    assert state in open_groups() and state.revoke() and revoked == [1]
    state.close()
    assert state not in open_groups() and not state.revoke() and revoked == [1]
    with pytest.raises(
        GroupError, match=r'rank 1 of 4 \(group "test"\): scatter was called on a closed group'
    ):
        state.require_usable("scatter")


def test_an_error_that_is_not_mpis_stays_what_it_is(state):
    error = KeyError("the culprit")
    with pytest.raises(KeyError) as caught, state.explained("scatter"):
        raise error
    assert caught.value is error and state.failure is None


def test_an_error_of_mpi_is_the_failure_that_another_rank_reports_soon(monkeypatch):
    # ``on_timeout="raise"``: the late rank's call meets messages of a call that was left.
    comm = SimpleNamespace(rank=1, size=4, plain=SimpleNamespace(), children=list)
    settings = GroupSettings("test", "key", (10, 11, 12, 13), 600, on_timeout=RAISE)
    state, failures = GroupState(comm, settings), []
    monkeypatch.setattr(group_state.mpi_errors, "is_mpi_error", lambda error: True)
    monkeypatch.setattr(group_state.mpi_errors, "is_failure", lambda error: False)
    monkeypatch.setattr(group_state.mpi_errors, "explain", lambda error, *_: error)
    monkeypatch.setattr(group_state.runtime, "note_failure", lambda: failures.append(1))
    report = threading.Timer(0.2, state.fail, [CommTimeout("the report of rank 0")])
    report.start()
    with pytest.raises(CommTimeout, match="the report of rank 0"), state.explained("barrier"):
        raise KeyError("message truncated")
    report.join()
    assert failures == [1]
    # Without a report the error is MPI's.
    state.failure = None
    monkeypatch.setattr(group_state, "_NEWS_S", 0.05)
    with pytest.raises(KeyError, match="message truncated"), state.explained("barrier"):
        raise KeyError("message truncated")


def test_the_groups_of_a_forked_child_have_failed(state, monkeypatch):
    registry = WeakRegistry()
    registry.add(state)
    monkeypatch.setattr(group_state, "_states", registry)
    group_state._forbid_in_child()
    with pytest.raises(Exception, match=r"process forked from the rank.*'spawn' or 'forkserver'"):
        state.require_usable("scatter")
