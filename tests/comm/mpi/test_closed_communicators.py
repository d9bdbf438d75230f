"""Closed communicators: how long they are kept, and what is received before they are freed."""

import pytest

from mpidist.comm.mpi.closed_communicators import KEPT, ClosedCommunicators

pytestmark = pytest.mark.mpi


class _Request:
    def __init__(self, is_over=True, error=None):
        self.is_over, self.error = is_over, error

    def Test(self, status=None):
        if self.error is not None:
            raise self.error
        return self.is_over


class _Message:
    def __init__(self, request):
        self.request = request

    def Irecv(self, space):
        return self.request


class _Comm:
    """A communicator whose probes return what the test has put into ``messages``."""

    def __init__(self, log, name, barrier=None, messages=()):
        self.log, self.name = log, name
        self.barrier = barrier or _Request()
        self.messages = list(messages)
        self.probes = 0

    def Ibarrier(self):
        return self.barrier

    def Improbe(self, source, tag, status):
        self.probes += 1
        return self.messages.pop(0) if self.messages else None

    def Free(self):
        self.log.append(self.name)


def _add(closed, log, count, first=0):
    for number in range(first, first + count):
        closed.add(_Comm(log, number))


def test_a_communicator_is_freed_with_its_children_after_eight_more(group):
    closed, log = ClosedCommunicators(), []
    closed.add(_Comm(log, "group"), [_Comm(log, "node"), _Comm(log, "leaders")])
    _add(closed, log, KEPT - 1)
    assert log == []
    _add(closed, log, 1, first=7)
    assert log == ["node", "leaders", "group"]
    _add(closed, log, 20, first=8)
    assert log[3:] == list(range(20))


def test_one_that_a_member_has_not_closed_is_kept_and_holds_up_no_other(group):
    closed, log, barrier = ClosedCommunicators(), [], _Request(is_over=False)
    late = _Comm(log, "late", barrier)
    closed.add(late)
    _add(closed, log, 2 * KEPT)
    assert log == list(range(KEPT)) and late.probes == 0
    barrier.is_over = True
    _add(closed, log, 1, first=99)
    assert log == [*range(KEPT), "late", KEPT]


def test_late_messages_are_received_until_three_probes_find_none(group):
    log, incomplete = [], _Request(is_over=False)
    closed = ClosedCommunicators()
    comm = _Comm(log, "group", messages=[_Message(_Request()), None, _Message(incomplete)])
    closed.add(comm)
    _add(closed, log, KEPT)
    assert comm.probes == 6 and log == []
    incomplete.is_over = True
    _add(closed, log, 1, first=99)
    assert log == ["group", 0]


def test_a_communicator_with_a_dead_member_is_never_freed(group):
    closed, log = ClosedCommunicators(), []
    closed.add(_Comm(log, "dead", _Request(error=RuntimeError("a member has died"))))
    refusing = _Comm(log, "revoked")
    refusing.Ibarrier = lambda: (_ for _ in ()).throw(RuntimeError("revoked"))
    closed.add(refusing)
    _add(closed, log, 2 * KEPT)
    assert log == list(range(KEPT))


def test_a_closed_group_is_not_revoked(world):
    """The watchdog's thread may come to its revocation after the close."""
    group = world.clone("revoked late")
    called = []
    group._mpi = _Comm(called, "own")
    group._mpi.Revoke = lambda: called.append("revoked")
    plain = group._comm.plain
    assert group.revoke() and called == ["revoked"]
    group._mpi = plain
    group.close()
    group._mpi = _Comm(called, "own")
    group._mpi.Revoke = lambda: called.append("revoked")
    assert not group.revoke() and called == ["revoked"]
