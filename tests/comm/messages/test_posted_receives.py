"""Posted-receive queue: matching in the order of posting, and its work."""

import pytest
import torch

from mpidist.comm.messages import posted_receives
from mpidist.comm.mpi.library import MPI
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=2)


def test_receives_match_in_the_order_of_posting(group):
    if group.rank == 0:
        first, wildcard, other_tag, last = (torch.zeros(1) for _ in range(4))
        works = [
            group.irecv(first, 1),
            group.irecv(wildcard),
            group.irecv(other_tag, 1, tag=9),
            group.irecv(last, 1),
        ]
        group.barrier()
        for work in reversed(works):
            work.wait()
        got = [tensor.item() for tensor in (first, wildcard, other_tag, last)]
        ok = got == [1.0, 2.0, 4.0, 3.0]
    else:
        group.barrier()
        if group.rank == 1:
            for value, tag in ((1.0, 0), (2.0, 0), (3.0, 0), (4.0, 9)):
                group.send(torch.tensor([value]), 0, tag=tag)
        ok, got = True, []
    agree(group, ok, str(got))


def post(queue, source, tag):
    space = bytearray(4), 4, None
    receive = posted_receives.PostedReceive(queue, space, source, tag, None, None)
    queue.add(receive, waits=True)
    return receive


class _Silent:
    """A communicator without messages, or whose first is another's."""

    probes = questions = 0
    other_tag = None

    def Improbe(self, source, tag, status):
        self.probes += 1

    def Iprobe(self, source, tag, status):
        assert (source, tag) == (MPI.ANY_SOURCE, MPI.ANY_TAG)
        self.questions += 1
        status.Set_source(0)
        status.Set_tag(self.other_tag or 0)
        return self.other_tag is not None


def test_posting_and_testing_probe_for_one_pattern(group):
    """With a probe for each posted pattern at each call, 2000 receives of 2000 tags took 30 s."""
    mpi = _Silent()
    queue = posted_receives.ReceiveQueue(mpi)
    receives = [post(queue, 0, tag) for tag in range(100)]
    assert not any(receive.Test() for receive in receives)
    # By the tests alone, because the thread that posts waits next: each of its own pattern, and
    # one question for all.
    assert mpi.probes == mpi.questions == 100
    assert not queue.match() and (mpi.probes, mpi.questions) == (100, 101)
    queue.close()
    assert queue.is_empty() and all(receive.Test() for receive in receives)


def test_behind_the_message_of_another_each_pattern_is_probed_for(group):
    mpi = _Silent()
    mpi.other_tag = 5000
    queue = posted_receives.ReceiveQueue(mpi)
    receives = [post(queue, 0, tag) for tag in range(100)]
    assert not queue.match() and (mpi.probes, mpi.questions) == (100, 1)
    assert not receives[7].Test() and (mpi.probes, mpi.questions) == (101, 2)

    def refuse(source, tag, status):
        raise MPI.Exception(MPI.ERR_OTHER)

    mpi.Iprobe = refuse  # as after a death
    assert not queue.match() and mpi.probes == 201
    queue.close()


class _Counted(posted_receives.PostedReceive):
    """A posted receive that counts how often it is looked at while a queue is searched."""

    looks = 0

    def __getattribute__(self, name):
        type(self).looks += name in ("pattern", "number")
        return super().__getattribute__(name)

    def __eq__(self, other):
        type(self).looks += 1
        return self is other

    __hash__ = None


def test_the_work_of_a_receive_does_not_grow_with_those_posted(group, monkeypatch):
    """Messages arrive in the opposite order: each scan of a list would pass all receives."""
    monkeypatch.setattr(posted_receives, "PostedReceive", _Counted)

    class Arrived:
        def __init__(self):
            self.tags = []

        def Improbe(self, source, tag, status):
            if not self.tags or self.tags[-1] != tag:
                return None
            status.Set_source(self.sender)
            status.Set_tag(self.tags.pop())
            status.Set_elements(MPI.BYTE, 4)
            return self

        def Iprobe(self, source, tag, status):
            status.Set_source(self.sender)
            status.Set_tag(self.tags[-1] if self.tags else 0)
            return bool(self.tags)

        def Irecv(self, space):
            return self

        def Test(self):
            return True

    def looks(count):
        mpi = Arrived()
        queue = posted_receives.ReceiveQueue(mpi)
        _Counted.looks = 0
        receives = []
        for tag in range(count):
            # From one sender, from any, and one of the same pattern that is withdrawn.
            source = MPI.ANY_SOURCE if tag % 2 else 3
            receives.append(post(queue, source, tag))
            post(queue, 3, tag).Cancel()
        mpi.tags, mpi.sender = list(range(count)), 3
        assert all(receive.Test() for receive in reversed(receives)) and queue.is_empty()
        return _Counted.looks

    # Below and above the number from which a thread that waits starts the receives of all.
    few, many, most = looks(20), looks(200), looks(2000)
    assert many <= 10 * few + 50 and most <= 10 * many + 50


def test_a_message_goes_to_the_receive_that_was_posted_first(group):
    """Whichever pattern is probed, of one sender or of any, and also after a withdrawal."""
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    tensors = [torch.zeros(1) for _ in range(5)]
    works = [
        group.irecv(tensor, src, 3)
        for tensor, src in zip(tensors, (left, None, left, None, left), strict=True)
    ]
    works[2].cancel()
    group.barrier()
    for number in range(4):
        group.send(torch.full((1,), number + 1.0), right, 3)
    for place in (4, 3, 1, 0):
        works[place].wait()
    got = [tensor.item() for tensor in tensors]
    agree(group, got == [1, 2, 0, 3, 4], f"{got}")
