"""Messages longer than their receives: no write past the end, and an error with both lengths."""

import pytest
import torch

from mpidist.comm.messages import posted_receives, receive_poller
from mpidist.comm.mpi import mpi_errors
from mpidist.comm.mpi.library import MPI
from mpidist.errors import DisagreementError, MpidistError
from tests.tools.support import agree, raises_on_all

HALF = torch.bfloat16

pytestmark = pytest.mark.mpi(min_size=2)

GUARD = 77.0


def guarded(numel, beyond, dtype=torch.float32):
    """Return a tensor and the memory after it."""
    memory = torch.full((numel + beyond,), GUARD).to(dtype)
    return memory[:numel], memory[numel:]


def is_untouched(memory):
    return bool((memory == GUARD).all())


@pytest.mark.parametrize("posted_first", [True, False])
def test_a_longer_message_stays_outside_the_tensor(group, posted_first):
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    wrong = []
    for numel, sent in (
        (1, 3),
        (100, 900),
        (100, 3000),
        (1000, 20_000),
        (1, 300_000),
        (200_000, 700_000),
    ):
        tensor, behind = guarded(numel, sent)
        if posted_first:
            incoming = group.irecv(tensor, left)
            group.barrier()
            outgoing = group.isend(torch.zeros(sent), right)
        else:
            outgoing = group.isend(torch.zeros(sent), right)
            group.barrier()
            incoming = group.irecv(tensor, left)
        try:
            incoming.wait()
            wrong.append(f"{numel} of {sent}: no error")
        except MpidistError as error:
            if f"expected {4 * numel} bytes" not in str(
                error
            ) or f"rank {left} sent {4 * sent}" not in str(error):
                wrong.append(str(error))
        outgoing.wait()
        if not is_untouched(tensor) or not is_untouched(behind):
            wrong.append(f"{numel} of {sent}: written past the end")
        # The next message is received as usual.
        outgoing = group.isend(torch.full((2,), float(group.rank)), right)
        into = torch.zeros(2)
        if group.recv(into, left) != left or not bool((into == left).all()):
            wrong.append(f"the message after {sent}: {into}")
        outgoing.wait()
    agree(group, not wrong, "; ".join(wrong))


def test_collectives_of_different_sizes_keep_to_their_memory(group):
    """One rank's tensor is longer than the others': errors, and no write past the end."""
    wrong = []
    small, large = 3000, 9000

    def is_longer(rank):
        return rank == 0

    numel = large if is_longer(group.rank) else small
    for name, dtype, call in (
        ("broadcast", torch.float32, lambda t: group.broadcast(t, 0)),
        ("short broadcast", torch.float32, lambda t: group.broadcast(t[: len(t) // 1000], 0)),
        ("all_reduce", torch.bfloat16, group.all_reduce),
    ):
        if name == "all_reduce" and group.size > 2:
            continue  # MPI's own reduction, whose sizes are the same on all ranks
        tensor, behind = guarded(numel, large, dtype)
        tensor = tensor.clone() if dtype is torch.bfloat16 and is_longer(group.rank) else tensor
        try:
            call(tensor)
            if not (name.endswith("broadcast") and group.rank == 0):  # the root gets no length
                wrong.append(f"{name}: no error")
        except DisagreementError as error:
            if "sent" not in str(error) or "MPIDIST_DEBUG" not in str(error):
                wrong.append(f"{name}: {error}")
        if not is_untouched(behind):
            wrong.append(f"{name}: written past the end")
    agree(group, not wrong, "; ".join(wrong))


@pytest.mark.mpi(min_size=2)
def test_our_reductions_of_different_sizes_return_on_no_rank(group):
    """One rank has an element more: without a word to the others some would have a number."""
    for numel, dtype in ((1 << 22, torch.float32), (1 << 22, torch.bfloat16), (100_000, HALF)):
        for odd in {0, group.size - 1}:
            tensor = torch.ones(numel + (group.rank == odd), dtype=dtype)
            text = raises_on_all(
                group, DisagreementError, lambda tensor=tensor: group.all_reduce(tensor), "bytes"
            )
            assert "MPIDIST_DEBUG=1" in text
    total = torch.ones(100_000, dtype=HALF)
    group.all_reduce(total)
    agree(group, bool((total == group.size).all()))


def test_the_error_of_one_call_of_mpi_names_the_debug_mode(group):
    error = MPI.Exception(MPI.ERR_TRUNCATE)
    text = str(mpi_errors.translate(error, "rank 0: all_reduce"))
    assert "differ in size, or they called different collectives: with MPIDIST_DEBUG=1" in text
    error = MPI.Exception(MPI.ERR_ARG)
    assert "MPIDIST_DEBUG" not in str(mpi_errors.translate(error, "rank 0: all_reduce"))


def test_lists_of_other_sizes_than_the_messages_keep_to_their_memory(group):
    wrong = []
    right = (group.rank + 1) % group.size
    sent, expected = 30_000, 10_000
    memory = [guarded(sent if peer == group.rank else expected, sent) for peer in range(group.size)]
    try:
        group.all_gather([tensor for tensor, _ in memory], torch.zeros(sent))
        wrong.append("all_gather: no error")
    except DisagreementError as error:
        if f"sent {4 * sent} bytes, and this rank expected {4 * expected}" not in str(error):
            wrong.append(str(error))
    wrong += [
        f"all_gather wrote past the end of {peer}"
        for peer, (_, behind) in enumerate(memory)
        if not is_untouched(behind)
    ]
    inputs = [torch.zeros(expected) for _ in range(group.size)]
    inputs[right] = torch.zeros(sent)
    memory = [guarded(expected, sent) for _ in range(group.size)]
    try:
        group.all_to_all([tensor for tensor, _ in memory], inputs)
        wrong.append("all_to_all: no error")
    except DisagreementError:
        pass
    wrong += [
        f"all_to_all wrote past the end of {peer}"
        for peer, (_, behind) in enumerate(memory)
        if not is_untouched(behind)
    ]
    agree(group, not wrong, "; ".join(wrong))
    total = torch.ones(3)
    group.all_reduce(total)  # the group still works
    agree(group, total.tolist() == [group.size] * 3)


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


def test_a_closed_group_withdraws_its_posted_receives(group):
    child = group.clone("short life")
    work = child.irecv(torch.zeros(3), (group.rank + 1) % group.size)
    child.close()
    with pytest.raises(MpidistError, match="closed while a receive was posted"):
        work.wait()
    agree(group, receive_poller._poller.match() is False)


def test_posting_and_testing_probe_for_one_pattern(group):
    """With a probe for each posted pattern at each call, 2000 receives of 2000 tags took 30 s."""

    class Silent:
        probes = 0

        def Improbe(self, source, tag, status):
            self.probes += 1

    mpi = Silent()
    queue = posted_receives.ReceiveQueue(mpi)
    receives = [queue.post((bytearray(4), 4, None), 0, tag, waits=True) for tag in range(100)]
    assert not any(receive.Test() for receive in receives)
    assert mpi.probes == 100  # by the tests alone, because the thread that posts waits next
    assert not queue.match() and mpi.probes == 200
    queue.close()
    assert queue.is_empty() and all(receive.Test() for receive in receives)


class _Counted(posted_receives.PostedReceive):
    """A posted receive that counts how often it is looked at while a queue is searched."""

    looks = 0

    def __getattribute__(self, name):
        type(self).looks += name in ("accepts", "source", "tag", "number")
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
            receives.append(queue.post((bytearray(4), 4, None), source, tag, True))
            queue.post((bytearray(4), 4, None), 3, tag, True).Cancel()
        mpi.tags, mpi.sender = list(range(count)), 3
        assert all(receive.Test() for receive in reversed(receives)) and queue.is_empty()
        return _Counted.looks

    few, many = looks(50), looks(500)
    assert many <= 10 * few + 50


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
