"""Chains of calls under way: who waits for whom, circles, and locks that close them."""

import pytest

from mpidist.comm.recorder.recording import Entry, Kind
from mpidist.comm.watchdog import call_waits

NAMES = {0: "worker0", 1: "worker1"}
NOW = dict.fromkeys(range(4), 5_000_000_000)
MAIN, FIRST, SECOND = 10, 11, 12  # threads


def entry(number, kind, operation, peer=-1, tag=0, thread=MAIN, end_ns=None, **fields):
    values = {"group": "", "sequence": 0, "dtype": "", "shape": (), "size_bytes": 0} | fields
    return Entry(
        number=number, kind=kind, operation=operation, peer=peer, tag=tag, thread=thread,
        begin_ns=number * 10**9, end_ns=end_ns, failed=False, **values,
    )  # fmt: skip


def call(number, operation, peer, tag, thread=MAIN, **fields):
    return entry(number, Kind.CALL, operation, peer, tag, thread, **fields)


def handler(number, operation, peer, tag, thread=FIRST, **fields):
    return entry(number, Kind.HANDLER, operation, peer, tag, thread, **fields)


def said(chain):
    return call_waits.sentences(chain, NAMES, NOW)


# worker0's main thread calls f, which calls g.
NESTED = {
    0: [call(1, "f", 1, 7), handler(2, "g", 1, 3)],
    1: [handler(1, "f", 0, 7), call(2, "g", 0, 3, FIRST)],
}


def test_a_call_without_a_handler_has_not_begun():
    (chain,) = call_waits.chains({0: [call(1, "f", 1, 7)], 1: []})
    assert chain.ranks == (0, 1) and not chain.circle
    assert said(chain) == [
        "worker0 waits 4.0 s for f of worker1",
        "worker1 has not begun it, or has ended it",
    ]


def test_calls_that_have_ended_are_no_waits():
    ended = {rank: [each for each in entries] for rank, entries in NESTED.items()}
    ended[0][0] = call(1, "f", 1, 7, end_ns=3)
    ended[1] = [handler(1, "f", 0, 7, end_ns=2), call(2, "g", 0, 3, FIRST, end_ns=2)]
    assert call_waits.chains(ended) == []


def test_a_handler_whose_caller_has_given_up_begins_a_chain():
    """As at the timeout of the first call."""
    (chain,) = call_waits.chains(
        {0: NESTED[0][1:], 1: NESTED[1]}, {(0, FIRST): "train.py:5 in g()"}
    )
    assert chain.ranks == (1, 0) and not chain.circle
    assert said(chain)[-1] == "worker0 waits for a lock there, at train.py:5 in g()"


def test_a_handler_that_calls_back_closes_a_circle():
    (chain,) = call_waits.chains(NESTED)
    assert chain.circle == (0, 1, 0)
    assert call_waits.arrows(chain.circle, NAMES) == "worker0 -> worker1 -> worker0"
    assert call_waits.arrows((2, 0), NAMES) == "rank 2 -> worker0"
    assert said(chain) == [
        "worker0 waits 4.0 s for f of worker1",
        "worker1, as its handler, waits 3.0 s for g of worker0",
        "worker0 runs it, or waits for a lock there",
    ]


def test_a_handler_that_computes_closes_none():
    (chain,) = call_waits.chains(NESTED, {(0, FIRST): ""})
    assert not chain.circle and said(chain)[-1] == "worker0 runs it"


def test_a_lock_that_the_first_caller_may_hold_closes_it():
    (chain,) = call_waits.chains(NESTED, {(0, FIRST): "train.py:5 in g()"})
    assert chain.circle == (0, 1, 0) and chain.closed_at == 0
    assert said(chain)[-1] == (
        "worker0 waits for a lock there, at train.py:5 in g(); the thread in f may hold it"
    )


def test_two_calls_that_wait_for_each_others_locks_are_a_circle():
    """Each main thread holds a lock in its call, and each handler waits for the lock there."""
    crossed = {
        0: [call(1, "f", 1, 7), handler(2, "g", 1, 3)],
        1: [call(1, "g", 0, 3), handler(2, "f", 0, 7)],
    }
    locks = {(0, FIRST): "train.py:5 in g()", (1, FIRST): "train.py:9 in f()"}
    chain, other = call_waits.chains(crossed, locks)
    assert chain.circle == (0, 1, 0) and other.circle == (1, 0, 1)
    assert said(chain) == [
        "worker0 waits 4.0 s for f of worker1",
        "worker1, in a thread that may hold the lock, waits 4.0 s for g of worker0",
        "worker0 waits for a lock there, at train.py:5 in g(); the thread in f may hold it",
    ]
    # Without stacks a call is not more than a call.
    assert not any(chain.circle for chain in call_waits.chains(crossed))


def test_a_lock_that_no_caller_holds_closes_none():
    locked = {0: [call(1, "f", 1, 7)], 1: [handler(1, "f", 0, 7)]}
    (chain,) = call_waits.chains(locked, {(1, FIRST): "train.py:9 in f()"})
    assert not chain.circle
    assert said(chain)[-1] == "worker1 waits for a lock there, at train.py:9 in f()"


def test_a_handler_in_a_collective_is_said_to_be_in_it():
    inside = entry(3, Kind.COLLECTIVE, "all_reduce", thread=FIRST, group="world", sequence=4)
    (chain,) = call_waits.chains({0: [call(1, "f", 1, 7)], 1: [handler(1, "f", 0, 7), inside]})
    assert said(chain)[-1] == 'worker1 is in all_reduce number 4 of group "world" there'


@pytest.mark.parametrize("length", [3, 40])
def test_a_ring_of_workers_is_named_from_its_first(length):
    ring = {
        rank: [
            *([handler(1, f"f{rank}", rank - 1, 1)] if rank else [handler(9, "f0", length - 1, 1)]),
            call(2, "f", (rank + 1) % length, 1, FIRST if rank else MAIN),
        ]
        for rank in range(length)
    }
    (chain,) = call_waits.chains(ring)
    assert chain.circle == (*range(length), 0)
