"""Ends of threads and of the process; whole jobs are in integration/test_launch.py."""

import os
import sys
from collections import defaultdict
from types import SimpleNamespace

import pytest

from mpidist.comm.mpi import runtime
from mpidist.errors import CommTimeout
from mpidist.weak_registry import WeakRegistry


class Owner:
    def __init__(self, name, closed):
        self.name, self.closed = name, closed

    def close(self, timeout_s):
        assert timeout_s > 0
        self.closed.append(self.name)


def test_owners_are_closed_by_stage_and_the_first_stage_is_0(monkeypatch):
    monkeypatch.setattr(runtime, "_at_exit", defaultdict(WeakRegistry))
    runtime.world()
    closed = []
    owners = [Owner(name, closed) for name in ("last", "middle", "first")]
    runtime.close_at_exit(owners[0], 2)
    runtime.close_at_exit(owners[1], 1)
    runtime.close_at_exit(owners[2])
    runtime._close_all()
    assert closed == ["first", "middle", "last"]


@pytest.mark.parametrize("error", [ValueError("it"), SystemExit(3), KeyboardInterrupt()])
def test_an_exception_of_a_guarded_thread_ends_the_job(monkeypatch, error):
    ended = []
    monkeypatch.setattr(runtime, "_end_job_for", lambda *what: ended.append(what))

    def fail(number):
        assert number == 1
        raise error

    runtime.guard_thread(fail)(1)
    ((kind, raised, where),) = ended
    assert kind is type(error) and raised is error and where.startswith("in thread 'MainThread")
    runtime.guard_thread(lambda: None)()
    assert len(ended) == 1


def test_uses_are_abandoned_before_any_state_is_dropped(monkeypatch):
    done = []
    monkeypatch.setattr(runtime, "_parts", [])
    monkeypatch.setattr(runtime, "_world", None)
    for name in ("lower", "upper"):
        runtime.belongs_to_world(
            lambda name=name: done.append(("drop", name)),
            lambda: ["a use"],
            lambda name=name: done.append(("abandon", name)),
        )
    assert runtime.uses_of_world() == []
    # Without a world nothing is dropped.
    runtime.abandon_world()
    assert done == [("abandon", "upper"), ("abandon", "lower")]
    monkeypatch.setattr(runtime, "_world", object())
    assert runtime.uses_of_world() == ["a use", "a use"]


def test_a_recovery_is_recorded_with_its_status(monkeypatch):
    monkeypatch.setattr(runtime, "_unfinished", None)
    runtime.note_recovery(75)
    assert runtime.unfinished() == runtime.Unfinished(set(), 75)


def test_the_reason_is_recorded_before_the_process_ends(monkeypatch):
    recorded = []
    monkeypatch.setattr(runtime, "_pid_of_rank", os.getpid())
    monkeypatch.setattr(runtime, "_record_end", lambda *what: recorded.append(what))
    error = ValueError("it")
    runtime._record(str(error), error)
    assert recorded == [("it", error)]
    # A child of a rank has no recording, and what fails here is not the reason.
    monkeypatch.setattr(runtime, "_record_end", lambda *what: 1 / 0)
    runtime._record("it")
    monkeypatch.setattr(runtime, "_pid_of_rank", -1)
    monkeypatch.setattr(runtime, "_record_end", lambda *what: recorded.append(what))
    runtime._record("it")
    assert len(recorded) == 1


def test_the_end_of_a_forked_child_is_no_end_of_the_job(monkeypatch, capsys):
    runtime.world()
    ended = []
    monkeypatch.setattr(runtime, "_end_job_for", lambda *what: ended.append(what))
    monkeypatch.setattr(runtime.atexit, "register", lambda *what: None)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    runtime._install_hooks(2)
    error = ValueError("of a process")
    sys.excepthook(ValueError, error, None)
    assert ended == [(ValueError, error, "uncaught")]
    monkeypatch.setattr(runtime, "_pid_of_rank", os.getpid() + 1)
    statuses = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    sys.excepthook(ValueError, error, None)
    assert len(ended) == 1 and "of a process" in capsys.readouterr().err and statuses == [1]
    runtime._delete_attribute(-1)  # with MPI's memory alone it would be an error


@pytest.mark.parametrize("is_child", [False, True])
def test_an_exception_of_our_thread_in_a_forked_child_ends_it_alone(monkeypatch, capfd, is_child):
    runtime.world()
    done = []
    job = SimpleNamespace(Abort=lambda code: done.append("job"))
    monkeypatch.setattr(runtime, "MPI", SimpleNamespace(Is_finalized=lambda: False, COMM_WORLD=job))
    monkeypatch.setattr(runtime, "_before_end", lambda: done.append("report"))
    monkeypatch.setattr(runtime, "_record_end", None)
    monkeypatch.setattr(os, "_exit", lambda code: done.append(code))
    if is_child:
        monkeypatch.setattr(runtime, "_pid_of_rank", os.getpid() + 1)

    def fail():
        raise CommTimeout("in a callback")

    runtime.guard_thread(fail)()
    assert done == ([1] if is_child else ["report", "job", 1])
    ends = "a process forked from the rank" if is_child else "the job"
    assert f"[rank 0] mpidist ends {ends}: CommTimeout in thread" in capfd.readouterr().err
