"""Messages of plain host memory: without a handle, and prepared for known memory."""

import pytest
import torch

from mpidist.comm.messages import direct_messages, p2p
from tests.comm.messages.test_p2p import ring
from tests.tools.support import agree, calls_of_ours

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.mark.parametrize("numel", [0, 2, 300_000])
def test_messages_that_arrive_soon_need_no_handle(group, monkeypatch, numel):
    monkeypatch.setattr(direct_messages, "_SPIN_S", 60.0)
    monkeypatch.setattr(p2p, "RequestWork", None)
    right, left = ring(group)
    into, ok = torch.zeros(numel), True
    for turn in range(20):
        out = torch.full((numel,), group.rank + turn + 0.5)
        for is_sending in (True, False) if group.rank else (False, True):
            if is_sending:
                group.send(out, right)
            else:
                ok &= group.recv(into, left) == left and bool((into == left + turn + 0.5).all())
    agree(group, ok)


def exchanged(group, out, into, right, left, tag=0):
    incoming = group.irecv(into, left, tag)
    outgoing = group.isend(out, right, tag)
    incoming.wait()
    outgoing.wait()
    return incoming


def test_one_memory_in_turns_of_other_forms(group):
    right, left = ring(group)
    memory, target, ok = torch.zeros(6), torch.zeros(6), True
    forms = [
        lambda whole: whole,
        lambda whole: whole[:2],
        lambda whole: whole.view(2, 3),
        lambda whole: whole.view(2, 3).t(),  # strided
        lambda whole: whole.view(torch.int32),
        lambda whole: whole.view(torch.complex64).conj(),
        lambda whole: torch._neg_view(whole),
        lambda whole: whole[:0],
    ]
    for turn in range(2):
        for place, form in enumerate(forms):
            memory.copy_(torch.arange(6.0) + 10 * group.rank + turn + place)
            expected = form(torch.arange(6.0) + 10 * left + turn + place)
            target.zero_()
            exchanged(group, form(memory), form(target), right, left, tag=place % 2)
            ok &= torch.equal(form(target).resolve_conj().resolve_neg(), expected)
    agree(group, ok)


def test_an_exchange_of_known_memory_calls_few_functions_of_ours(group):
    # To itself: a message of a rank that does not run just now is looked for again and again.
    own = group.rank
    out, into, counts = torch.full((2,), 1.0 + own), torch.zeros(2), []
    for _ in range(30):
        with calls_of_ours() as calls:
            exchanged(group, out, into, own, own)
        counts.append(len(calls))
    # Three for a send and five for a receive, with its place in the queue, and the ends of both; 29
    # before messages were prepared.
    agree(group, min(counts) <= 24 and torch.equal(into, out), str(counts))
