"""Copies of tables that other threads change: a garbage collection in the copy lets them run."""

import contextlib
import gc
import sys
from types import SimpleNamespace

import pytest

from mpidist.autograd import parts
from mpidist.autograd.context import Context
from mpidist.comm.execution.op_status import Journal
from mpidist.comm.messages.message_pieces import PieceTransfers
from mpidist.comm.messages.receive_poller import _Poller
from mpidist.comm.mpi.tags import PIECE_TAGS

# More than CPython's free lists hold: the copy's memory is allocated.
COUNT = 40


@contextlib.contextmanager
def collecting(change):
    """Call ``change`` in each garbage collection, which every second allocation starts.

    As of Python 3.12 a collection starts between two instructions alone, and no copy is cut.
    """

    def begin(phase, info):
        if phase == "start":
            change()

    threshold = gc.get_threshold()
    assert gc.isenabled()
    gc.callbacks.append(begin)
    gc.set_threshold(1)
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(begin)


def call_often(function, change):
    kept = []
    with collecting(change):
        for _ in range(200):
            kept.append(function())  # or its memory would be that of the next call


def entering(table):
    """Return a function that adds an entry to a dict, or removes one."""
    added = iter(range(10**6, 10**9))

    def change():
        if len(table) > 2 * COUNT:
            table.popitem()
        else:
            table[next(added)] = next(iter(table.values()))

    return change


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="no copy is cut")
@pytest.mark.parametrize("copy", [lambda table: tuple(table.values()), lambda t: list(t.items())])
def test_these_copies_may_be_cut(copy):
    table = dict.fromkeys(range(COUNT), 1)
    with pytest.raises(RuntimeError, match="changed size"):
        call_often(lambda: copy(table), entering(table))


@pytest.mark.parametrize("name", ["match", "close"])
def test_transfers_in_pieces(name):
    pieces = PieceTransfers(SimpleNamespace(own_tag=lambda tag: PIECE_TAGS), None)
    transfer = SimpleNamespace(advance=lambda: False, close=lambda: None)
    pieces._active.update(dict.fromkeys(range(COUNT), transfer))
    call_often(lambda: ([], getattr(pieces, name)()), entering(pieces._active))


def test_queues_of_receives():
    poller = _Poller()
    poller._queues |= {Queue() for _ in range(COUNT)}

    def change():
        if len(poller._queues) > 2 * COUNT:
            poller._queues.pop()
        else:
            poller._queues.add(Queue())

    call_often(lambda: ([], poller.match()), change)


class Queue:
    def match(self):
        return False


def test_waits_of_a_journal():
    journal = Journal("group", "key")
    for key in range(-COUNT, 0):
        journal.enter_wait(key, "new_group", None)
    call_often(lambda: (journal.creation(), journal.waits()), entering(journal._waits))


def test_messages_of_an_autograd_context():
    context = Context(1)
    context.sends.update(dict.fromkeys(range(COUNT), SimpleNamespace(next_functions=())))
    context.receives.update(dict.fromkeys(range(COUNT), SimpleNamespace(message=1)))
    call_often(lambda: parts.plan_of(context), entering(context.sends))
    call_often(context._recv_functions, entering(context.receives))
