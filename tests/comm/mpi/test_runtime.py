"""Ends of threads and of the process; whole jobs are in integration/test_launch.py."""

import weakref

import pytest

from mpidist.comm.mpi import runtime


class Owner:
    def __init__(self, name, closed):
        self.name, self.closed = name, closed

    def close(self, timeout_s):
        assert timeout_s > 0
        self.closed.append(self.name)


def test_owners_are_closed_by_stage_and_the_first_stage_is_0(monkeypatch):
    monkeypatch.setattr(runtime, "_at_exit", weakref.WeakKeyDictionary())
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
