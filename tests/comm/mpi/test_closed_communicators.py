"""Closed communicators: how long they are kept, and what is received before they are freed."""

import random

import pytest

from mpidist.comm.mpi.closed_communicators import KEPT, ClosedCommunicators, _Barrier

pytestmark = pytest.mark.mpi
TAG = 41


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

    def Recv(self, space):
        assert self.request.is_over


class _Comm:
    """A communicator of ranks 0 and 1 on rank 0, whose probes return what the test has put in.

    Attributes:
        end: Rank 1's message of its close, or None while it has not come.
        messages: Results of the probes for other messages.
    """

    def __init__(self, log, name, has_end=True, messages=()):
        self.log, self.name = log, name
        self.end = _Message(_Request()) if has_end else None
        self.messages = list(messages)
        self.probes = 0
        self.sent = []

    def Get_rank(self):
        return 0

    def Get_size(self):
        return 2

    def Isend(self, data, to, tag):
        self.sent.append((to, tag))
        return _Request()

    def Improbe(self, source, tag, status):
        if (source, tag) == (1, TAG):
            return self.end
        self.probes += 1
        return self.messages.pop(0) if self.messages else None

    def Free(self):
        self.log.append(self.name)


def _add(closed, log, count, first=0):
    for number in range(first, first + count):
        closed.add(_Comm(log, number), TAG)


def test_a_communicator_is_freed_with_its_children_after_eight_more(group):
    closed, log = ClosedCommunicators(), []
    closed.add(_Comm(log, "group"), TAG, [_Comm(log, "node"), _Comm(log, "leaders")])
    _add(closed, log, KEPT - 1)
    assert log == []
    _add(closed, log, 1, first=7)
    assert log == ["node", "leaders", "group"]
    _add(closed, log, 20, first=8)
    assert log[3:] == list(range(20))


def test_one_that_a_member_has_not_closed_is_kept_and_holds_up_no_other(group):
    closed, log = ClosedCommunicators(), []
    late = _Comm(log, "late", has_end=False)
    closed.add(late, TAG)
    _add(closed, log, 2 * KEPT)
    assert log == list(range(KEPT)) and late.probes == 0
    late.end = _Message(_Request())
    _add(closed, log, 1, first=99)
    assert log == [*range(KEPT), "late", KEPT] and late.sent == [(1, TAG)]


def test_late_messages_are_received_until_three_probes_find_none(group):
    log, incomplete = [], _Request(is_over=False)
    closed = ClosedCommunicators()
    comm = _Comm(log, "group", messages=[_Message(_Request()), None, _Message(incomplete)])
    closed.add(comm, TAG)
    _add(closed, log, KEPT)
    assert comm.probes == 6 and log == []
    incomplete.is_over = True
    _add(closed, log, 1, first=99)
    assert log == ["group", 0]


def test_a_communicator_with_a_dead_member_is_never_freed(group):
    closed, log = ClosedCommunicators(), []
    dead = RuntimeError("a member has died")
    for name in ("Isend", "Improbe"):
        comm = _Comm(log, name)
        setattr(comm, name, lambda *args: (_ for _ in ()).throw(dead))
        closed.add(comm, TAG)
    _add(closed, log, 2 * KEPT)
    assert log == list(range(KEPT))


def test_a_members_message_that_was_received_before_is_not_waited_for(group):
    closed, log = ClosedCommunicators(), []
    closed.add(_Comm(log, "group", has_end=False), TAG, (), {1})
    _add(closed, log, KEPT)
    assert log == ["group"]


class _Wires:
    """Messages of several ranks of this process, by receiver, sender and tag."""

    def __init__(self, size):
        self.size, self.held = size, set()
        self.late = set()

    def of(self, rank):
        wires = self

        class Comm(_Comm):
            def Get_rank(self):
                return rank

            def Get_size(self):
                return wires.size

            def Isend(self, data, to, tag):
                assert (to, rank) not in wires.held | wires.late and to != rank
                wires.held.add((to, rank))
                return _Request()

            def Improbe(self, source, tag, status):
                if tag != TAG or (rank, source) not in wires.held:
                    return None
                wires.held.remove((rank, source))
                wires.late.add((rank, source))
                return _Message(_Request())

        return Comm(None, rank)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 13, 64])
def test_no_rank_passes_the_barrier_before_the_last_has_come(group, size):
    wires = _Wires(size)
    comms = [wires.of(rank) for rank in range(size)]
    order = random.Random(size).sample(range(size), size)
    barriers = []
    for rank in order:
        assert not any(barrier.Test() for barrier in barriers * 3)
        barriers.append(_Barrier(comms[rank], TAG, ()))
    for _ in range(size):
        ended = [barrier.Test() for barrier in barriers]
    assert all(ended) and not wires.held


def test_a_closed_group_is_not_revoked(world):
    """The watchdog's thread may come to its revocation after the close."""
    group = world.clone("revoked late")
    called = []
    group._state.mpi = _Comm(called, "own")
    group._state.mpi.Revoke = lambda: called.append("revoked")
    plain = group._comm.plain
    assert group.revoke() and called == ["revoked"]
    group._state.mpi = plain
    group.close()
    group._state.mpi = _Comm(called, "own")
    group._state.mpi.Revoke = lambda: called.append("revoked")
    assert not group.revoke() and called == ["revoked"]
