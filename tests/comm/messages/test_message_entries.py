"""Entries of messages: each ends once, however its message ends."""

from __future__ import annotations

import pytest
import torch

from mpidist.comm.recorder import recorder, recording
from mpidist.errors import CommTimeout
from tests.tools.support import agree


def entries(since):
    """Return this rank's messages after an entry: operation, peer, tag, whether over, failed."""
    found = recording.read(recorder.of_process().path).entries
    return [
        (one.operation, one.peer, one.tag, one.end_ns is not None, one.failed)
        for one in found
        if one.number > since and one.kind in ("send", "receive")
    ]


@pytest.mark.mpi(min_size=2)
def test_every_message_has_one_entry(own_recorder, group):
    following, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    peer, sender = group.world_ranks[following], group.world_ranks[before]
    since = own_recorder.begin(0)
    own_recorder.end(since)
    value = torch.ones(3)
    work = group.isend(value, following, 5)
    group.recv(torch.zeros(3), before, 5)
    work.wait()
    # Not contiguous, and longer than what is sent at once.
    received = group.irecv(torch.zeros(300_000, 2).t(), before, 6)
    sent = group.isend(torch.ones(2, 300_000).t().contiguous().t(), following, 6)
    assert ("irecv", sender, 6, False, False) in entries(since)
    received.wait()
    sent.wait()
    group.send(torch.ones(()), following) if group.rank % 2 == 0 else None
    found = entries(since)
    agree(
        group,
        found[:4]
        == [
            ("isend", peer, 5, True, False),
            ("recv", sender, 5, True, False),
            ("irecv", sender, 6, True, False),
            ("isend", peer, 6, True, False),
        ],
        str(found),
    )
    if group.rank % 2 == 0:
        assert found[4:] == [("send", peer, 0, True, False)]
    if before % 2 == 0:
        group.recv(torch.zeros(()), before)
    # A receive that is withdrawn, and a handle that is dropped.
    late = group.irecv(torch.zeros(2), before, 9)
    with pytest.raises(CommTimeout):
        late.wait(0.01)
    late.cancel()
    assert entries(since)[-1] == ("irecv", sender, 9, True, True)
    group.send_object("x" * group.rank, following) if group.rank % 2 == 0 else None
    if before % 2 == 0:
        group.recv_object(before)
        assert entries(since)[-1] == ("recv_object", sender, 0, True, False)
    group.barrier()
    dropped = group.irecv(torch.zeros(2), before, 9)
    group.isend(torch.ones(2), following, 9)
    dropped.wait()
    assert entries(since)[-1] == ("isend", peer, 9, True, False)


@pytest.mark.mpi(min_size=2)
def test_a_receive_from_any_rank_has_its_sender_at_its_end(own_recorder, group):
    following, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    sender = group.world_ranks[before]
    since = own_recorder.begin(0)
    own_recorder.end(since)
    group.barrier()
    posted = group.irecv(torch.zeros(2), tag=2)
    # Not contiguous, so it does not take the direct path.
    strided = group.irecv(torch.zeros(2, 4).t(), tag=3)
    assert [peer for _, peer, *_ in entries(since)] == [-1, -1]
    sends = [group.isend(torch.ones(size), following, tag) for size, tag in ((2, 2), (8, 3))]
    for work in (posted, strided, *sends):
        work.wait()
    sends = [group.isend(torch.ones(2), following, 4)]
    group.recv(torch.zeros(2), tag=4)
    sends[0].wait()
    group.send_object("x", following) if group.rank % 2 == 0 else None
    if before % 2 == 0:
        group.recv_object()
    found = [one for one in entries(since) if "recv" in one[0]]
    expected = [("irecv", 2), ("irecv", 3), ("recv", 4)]
    expected += [("recv_object", 0)] if before % 2 == 0 else []
    wanted = [(operation, sender, tag, True, False) for operation, tag in expected]
    agree(group, found == wanted, str(found))
