"""Containers of outstanding calls and held references: few for each, whatever their number.

Python's garbage collector scans every container that is alive each time their number has grown by a
quarter; the cost of a call is flat only as long as a call keeps few of them.
"""

from __future__ import annotations

import gc

import pytest

import mpidist.rpc as rpc
from mpidist.rpc import current
from mpidist.rpc.rref_store import RRefStore, new_id
from tests.rpc.limits import soon
from tests.tools.support import agree

_N = 2000


def containers():
    """Return the number of containers that the garbage collector scans."""
    # Twice: a first collection stops the scan of tuples and dicts of plain values.
    gc.collect()
    gc.collect()
    return len(gc.get_objects())


def test_an_owned_value_is_one_container():
    store = RRefStore(0)
    kept = []
    before = containers()
    for number in range(_N):
        entry = store.create_for(1, new_id(1, 2 * number), new_id(1, 2 * number + 1))
        entry.set(number)
        kept.append(entry)
    assert (containers() - before) / _N < 1.1


@pytest.mark.mpi(min_size=2)
def test_a_reference_is_two_containers_whether_its_call_is_answered_or_not(group, workers):
    found = []
    if group.rank == 0:
        to = current.require().workers.infos[1].name
        before = containers()
        held = [rpc.remote(to, int, timeout=0) for _ in range(_N)]
        agent = current.require()
        soon(lambda: not agent.calls.creations())
        # The reference, and its call.
        found.append((containers() - before) / _N)
        del held
    # Also a barrier: the worker serves the calls meanwhile.
    agree(group, not found or found[0] < 2.2, str(found))
