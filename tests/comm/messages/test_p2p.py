"""Point-to-point messages: tags, any source, batches, timeouts."""

import threading
import time

import pytest
import torch

from mpidist.comm.memory import buffer
from mpidist.comm.messages import direct_messages
from mpidist.comm.messages.p2p import P2POp
from mpidist.errors import CommTimeout, MpidistError
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=2)


def ring(group):
    return (group.rank + 1) % group.size, (group.rank - 1) % group.size


@pytest.mark.parametrize("numel", [0, 1, 1000, 300_000])
def test_isend_and_irecv_around_the_ring(group, numel):
    right, left = ring(group)
    out, into = torch.full((numel,), float(group.rank)), torch.full((numel,), -1.0)
    incoming = group.irecv(into, left)
    outgoing = group.isend(out, right)
    ok = incoming.wait() and outgoing.wait() and incoming.is_completed()
    agree(group, ok and incoming.source_rank() == left and bool((into == left).all()))


def test_send_and_recv_between_neighbours(group):
    tensor = torch.zeros(5, dtype=torch.bfloat16)
    if group.rank == 0:
        group.send(torch.arange(5).bfloat16(), 1)
    elif group.rank == 1:
        assert group.recv(tensor, 0) == 0
    agree(group, group.rank != 1 or tensor.tolist() == [0, 1, 2, 3, 4])


def test_tags_match_out_of_order(group):
    got = {}
    if group.rank == 0:
        works = [group.isend(torch.tensor([float(tag)]), 1, tag=tag) for tag in (5, 6, 7)]
        for work in works:
            work.wait()
    elif group.rank == 1:
        for tag in (7, 5, 6):
            into = torch.zeros(1)
            group.recv(into, 0, tag=tag)
            got[tag] = into.item()
    agree(group, group.rank != 1 or got == {5: 5.0, 6: 6.0, 7: 7.0}, str(got))


def test_a_receive_from_any_source_returns_the_sender(group):
    ok = True
    if group.rank == 0:
        seen = set()
        for _ in range(group.size - 1):
            into = torch.zeros(2)
            source = group.recv(into)
            ok &= bool((into == source).all())
            seen.add(source)
        ok &= seen == set(range(1, group.size))
    else:
        group.send(torch.full((2,), float(group.rank)), 0)
    agree(group, ok)


def test_a_batch_in_any_order_does_not_deadlock(group):
    right, left = ring(group)
    into = torch.zeros(200_000)
    works = group.batch_isend_irecv(
        [
            P2POp("isend", torch.full((200_000,), float(group.rank)), right),
            P2POp("irecv", into, left),
        ]
    )
    for work in works:
        work.wait()
    agree(group, bool((into == left).all()))


def test_strided_messages(group):
    right, left = ring(group)
    into = torch.zeros(4, 3).t()
    incoming = group.irecv(into, left)
    group.send(torch.full((6, 4), float(group.rank))[::2], right)
    incoming.wait()
    agree(group, bool((into == left).all()))


def test_messages_past_the_limit_of_mpi(group, monkeypatch):
    monkeypatch.setattr(buffer, "MAX_COUNT", 40)
    right, left = ring(group)
    into = torch.zeros(101)
    incoming = group.irecv(into, left)
    group.send(torch.full((101,), float(group.rank)), right)
    incoming.wait()
    agree(group, bool((into == left).all()))


def test_a_wait_that_is_too_short_may_be_repeated(group):
    right, left = ring(group)
    into = torch.zeros(1)
    incoming = group.irecv(into, left)
    with pytest.raises(CommTimeout, match=r"irecv did not end within 0\.05 s"):
        incoming.wait(0.05)
    group.barrier()
    group.send(torch.tensor([float(group.rank)]), right)
    incoming.wait(30)
    agree(group, into.item() == left)


def test_a_send_is_not_withdrawn(group):
    """Its cancel() neither waits for the receiver nor calls MPI_Cancel."""
    right, left = ring(group)
    work = group.isend(torch.full((300_000,), float(group.rank)), right)
    work.cancel()
    into = torch.zeros(300_000)
    group.recv(into, left)
    agree(group, work.wait() and bool((into == left).all()))


def test_a_receive_without_a_message_is_withdrawn_at_the_groups_timeout(group):
    group.timeout_s = 0.1
    into = torch.full((1,), 7.0)
    with pytest.raises(CommTimeout):
        group.recv(into, (group.rank + 1) % group.size)
    group.timeout_s = None
    group.barrier()
    # A later message of the same tag goes to a later receive.
    right, left = ring(group)
    later = torch.zeros(1)
    work = group.isend(torch.tensor([float(group.rank)]), right)
    group.recv(later, left)
    work.wait()
    agree(group, into.item() == 7.0 and later.item() == left)


def test_a_shorter_message_is_an_error_that_names_both_sizes(group):
    right, left = ring(group)
    work = group.isend(torch.zeros(2), right)
    with pytest.raises(MpidistError, match=rf"expected 12 bytes .*rank {left} sent 8"):
        group.recv(torch.zeros(3), left)
    work.wait()
    group.barrier()


def test_a_longer_message_is_an_error(group):
    right, left = ring(group)
    work = group.isend(torch.zeros(4), right)
    with pytest.raises(MpidistError, match="recv"):
        group.recv(torch.zeros(3), left)
    work.wait()
    group.barrier()


@pytest.mark.parametrize("sent", [0, 2, 4, 100_000])
@pytest.mark.parametrize("is_any", [False, True])
@pytest.mark.parametrize("spin_s", [0.0, 30.0])
def test_after_a_message_of_another_length_the_next_one_arrives(
    group, monkeypatch, sent, is_any, spin_s
):
    """At once or late: the message is taken, and a longer one leaves the tensor as it was."""
    monkeypatch.setattr(direct_messages, "_SPIN_S", spin_s)
    right, left = ring(group)
    into = torch.full((3,), 7.0)
    work = group.isend(torch.zeros(sent), right)
    with pytest.raises(MpidistError, match=rf"expected 12 bytes .*rank {left} sent {4 * sent}"):
        group.recv(into, None if is_any else left)
    work.wait()
    is_kept = sent < 3 or bool((into == 7.0).all())
    work = group.isend(torch.full((3,), float(group.rank)), right)
    source = group.recv(into, None if is_any else left)
    work.wait()
    agree(group, is_kept and source == left and bool((into == left).all()), f"{source} {into}")


def test_a_wait_for_a_late_message_is_in_the_journal(group):
    """The watchdog sees it there."""
    _, left = ring(group)
    into, seen = torch.zeros(2), []

    def answer():
        while not any(wait.operation == "recv" for wait in group.journal.waits()):
            time.sleep(1e-3)
        seen.append(True)
        group.send(torch.zeros(1), left, tag=1)

    thread = threading.Thread(target=answer)
    if group.rank == 0:
        thread.start()
        group.recv(into, left)
        thread.join()
    if group.rank == group.size - 1:  # the left neighbour of rank 0
        group.recv(torch.zeros(1), 0, tag=1)
        group.send(torch.ones(2), 0)
    agree(group, group.rank != 0 or (seen == [True] and bool((into == 1).all())))


def test_futures_of_messages(group):
    right, left = ring(group)
    into = torch.zeros(3)
    incoming = group.irecv(into, left)
    future = incoming.get_future()
    group.send(torch.full((3,), float(group.rank)), right)
    incoming.wait()
    agree(group, future.done() and bool((future.value()[0] == left).all()))


def test_a_message_whose_handle_was_dropped_arrives_whole(group):
    right, left, numel = (group.rank + 1) % group.size, (group.rank - 1) % group.size, 200_000
    for turn in range(5):
        group.isend(torch.full((numel,), group.rank + 10.0 * turn), right)
        junk = [torch.full((numel,), -1.0) for _ in range(3)]
        time.sleep(0.01)
        got = torch.zeros(numel)
        group.recv(got, left)
        agree(
            group,
            bool((got == left + 10.0 * turn).all()) and len(junk) == 3,
            f"turn {turn}: {got[:3]}",
        )
