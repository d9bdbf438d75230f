"""Thread that probes for posted receives while no thread waits for them."""

import pytest
import torch

from mpidist.comm.messages import receive_poller
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
