"""Thread that probes for posted receives while no thread waits for them."""

import time

import pytest
import torch

from mpidist.comm.messages import receive_poller
from mpidist.comm.mpi import agreement_lock
from mpidist.errors import MpidistError
from tests.tools.support import agree

two_ranks = pytest.mark.mpi(min_size=2)


def test_pauses_grow_while_nothing_is_matched():
    pauses, pause_s, idle_s = [], 0.0, 0.0
    while idle_s < 1:
        pause_s = receive_poller._next_pause(pause_s, idle_s)
        # A message is noticed within 2 ms, or a sixteenth of the time that its receive has waited.
        assert pause_s <= max(2e-3, idle_s / 16)
        pauses.append(pause_s)
        idle_s += pause_s
    assert pauses[:3] == [5e-4, 1e-3, 2e-3] and pauses == sorted(pauses) and pauses[-1] == 8e-3
    assert receive_poller._next_pause(0.0, 0.0) == 5e-4


class Queue:
    """A queue that counts the rounds of probes."""

    def __init__(self, is_in_use=False):
        self.is_watched, self.is_in_use, self.rounds = True, is_in_use, 0

    def match(self):
        self.rounds += 1
        return False

    def is_empty(self):
        return False


def test_a_queue_in_use_is_left_to_its_owner():
    poller, used, unused = receive_poller._Poller(), Queue(is_in_use=True), Queue()
    poller._queues |= {used, unused}
    assert poller._match_unused(may_leave=True) is None
    assert (used.rounds, used.is_in_use, unused.rounds) == (0, False, 1)
    # The owner has made no call since.
    assert poller._match_unused(may_leave=True) is False
    assert (used.rounds, unused.rounds) == (1, 2)
    used.is_in_use = True
    assert poller._match_unused(may_leave=False) is False
    assert used.rounds == 2


def test_the_thread_probes_under_the_lock_of_agreements():
    poller, queue = receive_poller._Poller(), Queue()
    with agreement_lock.lock:
        poller.watch(queue)
        time.sleep(0.05)
        rounds = queue.rounds
    while not queue.rounds:
        time.sleep(1e-3)
    poller.close(10.0)
    assert rounds == 0


@pytest.mark.mpi(min_size=1)
def test_calls_of_messages_mark_their_queue(group, monkeypatch):
    # The thread would clear the mark.
    monkeypatch.setattr(receive_poller, "watch", lambda queue: None)
    queue = group._messages.receives
    work = group.irecv(torch.zeros(3), group.rank)
    was_marked, queue.is_in_use = queue.is_in_use, False
    group.isend(torch.ones(3), group.rank).wait()
    is_marked = queue.is_in_use
    work.wait()
    agree(group, was_marked and is_marked)


@two_ranks
def test_a_posted_receive_is_matched_while_its_owner_is_in_a_collective(group):
    """The sender of a long message enters the collective only after the match."""
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    into = torch.zeros(2_000_000)
    incoming = (
        group.irecv(into, left) if group.rank % 2 == 0 or group.rank == group.size - 1 else None
    )
    if group.rank % 2 == 1 or group.rank == 0:
        group.send(torch.full((2_000_000,), float(group.rank)), right)
    if incoming is None:
        group.recv(into, left)
    group.barrier()
    group.barrier()
    if incoming is not None and (left % 2 == 1 or left == 0):
        incoming.wait()
    elif incoming is not None:
        incoming.cancel()
        into.fill_(left)
    agree(group, bool((into == left).all()))


@two_ranks
def test_a_closed_group_withdraws_its_posted_receives(group):
    child = group.clone("short life")
    work = child.irecv(torch.zeros(3), (group.rank + 1) % group.size)
    child.close()
    with pytest.raises(MpidistError, match="closed while a receive was posted"):
        work.wait()
    agree(group, receive_poller._poller.match() is False)
