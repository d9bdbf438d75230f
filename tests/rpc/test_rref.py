"""References between workers: values, holders, errors, proxies; histories with random delays."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import threading
import weakref
from unittest import mock

import pytest
import torch

import mpidist.rpc as rpc
from mpidist.errors import CommTimeout, MpidistError, RRefError
from mpidist.rpc import api
from tests.rpc import network
from tests.rpc.limits import soon
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=1)
_kept: list[rpc.RRef] = []


class Counter:
    start = 0

    def __init__(self, start=0):
        self.count = start
        self.notes = []

    def add(self, number=1):
        self.count += number
        return self.count

    @classmethod
    def named(cls):
        return cls.__name__

    @staticmethod
    def twice(x):
        return 2 * x

    def __len__(self):
        return self.count

    def __call__(self, x):
        return x + self.count


def fail(words):
    raise ValueError(words)


_gate = threading.Event()


def waits_for_gate(value):
    _gate.wait(60)
    return value


def open_gate():
    _gate.set()


def give_back(x):
    return x


def fetch_all(rrefs):
    return [rref.to_here() for rref in rrefs]


def make(owner, value):
    """Make a reference on a third worker, and return it in a container of an object."""
    return {"inner": [Holder(rpc.remote(owner, torch.full, args=((3,), value)))]}


class Holder:
    def __init__(self, rref):
        self.rref = rref


def test_values_and_ownership(group, workers, to):
    rref = rpc.remote(to, torch.add, args=(torch.ones(2), 1))
    assert (
        rref.owner().name == to and rref.owner_name() == to and rref.is_owner() == (group.size == 1)
    )
    assert torch.equal(rref.to_here(), torch.full((2,), 2.0))
    assert soon(rref.confirmed_by_owner)  # the owner's answer may arrive after the value
    own = rpc.RRef(Counter(3))
    assert own.is_owner() and own.to_here() is own.local_value() and own.local_value().count == 3
    assert rpc.rpc_sync(to, give_back, args=(own,)).local_value() is own.local_value()
    if group.size > 1:
        with pytest.raises(RRefError, match=r"can't call localValue\(\) on user.*owner"):
            rref.local_value()
    for copier in (pickle.dumps, copy.deepcopy):
        with pytest.raises(RRefError, match="only be pickled when using RPC"):
            copier(own)


def test_references_travel_in_any_direction(group, workers):
    size, rank = group.size, group.rank
    user, owner = workers[(rank + 1) % size], workers[(rank + 2) % size]
    there = rpc.rpc_sync(user, make, args=(owner, float(rank)))  # made by another, returned to us
    rref = there["inner"][0].rref
    assert rref.owner_name() == owner and torch.equal(rref.to_here(), torch.full((3,), float(rank)))
    assert rpc.rpc_sync(user, fetch_all, args=([rref, rref],))[1][0] == rank  # user to user
    assert rpc.rpc_sync(owner, fetch_all, args=((rref,),))[0][0] == rank  # user to owner
    nested = rpc.remote(user, give_back, args=([rref],))  # a reference to a value that holds one
    assert nested.to_here()[0].to_here()[0] == rank
    many = [rpc.RRef(number) for number in range(200)]  # several in one message
    assert rpc.rpc_sync(user, fetch_all, args=(many,)) == list(range(200))
    back = rpc.rpc_sync(user, give_back, args=(many,))
    assert [one.local_value() for one in back] == list(range(200))


def test_errors_of_a_creation_reach_every_holder(group, workers, to):
    rref = rpc.remote(to, fail, args=("no value",))
    for holder in (to, workers[(group.rank + 2) % group.size]):
        with pytest.raises(ValueError, match="no value"):
            rpc.rpc_sync(holder, fetch_all, args=([rref],))
    with pytest.raises(ValueError, match="no value"):
        rref.to_here()
    assert rref.is_owner() or not rref.confirmed_by_owner()
    with pytest.raises(ValueError, match="no value"):
        rref.rpc_sync().anything()


def test_timeouts_surface_at_first_use(group, workers, to):
    _gate.clear()
    group.barrier()
    rref = rpc.remote(to, waits_for_gate, args=(1,), timeout=0.05)
    with pytest.raises(CommTimeout, match="RPC ran for more than"):
        rref._get_future().wait()
    for use in (rref.to_here, lambda: rpc.rpc_sync(to, give_back, args=(rref,))):
        with pytest.raises(RRefError, match="RRef creation"):
            use()
    patient = rpc.remote(to, waits_for_gate, args=(2,))
    if group.size > 1:
        # What the user has not called himself is named by what it is for.
        with pytest.raises(CommTimeout, match=r"type of a reference's value.*remote\(\)") as late:
            patient.remote(timeout=0.05).bit_length()
        assert "type_of" not in str(late.value)
        with pytest.raises(CommTimeout):
            patient.to_here(timeout=0.05)
    rpc.rpc_sync(to, open_gate)
    assert patient.to_here() == 2


def test_proxies(workers, to):
    rref = rpc.remote(to, Counter, args=(5,))
    assert (
        rref.rpc_sync().add() == 6
        and rref.rpc_async().add(number=4).wait() == 10
        and rref.remote().add(2).to_here() == 12
    )
    assert rref.rpc_sync().named() == "Counter" and rref.rpc_sync().twice(4) == 8
    assert rref.rpc_sync().__len__() == 12 and rref.rpc_sync()(1) == 13
    for call in (
        rref.rpc_sync().missing,
        lambda: rref.rpc_async().missing().wait(),
        rref.remote().missing,
    ):
        with pytest.raises(AttributeError, match="has no attribute 'missing'"):
            call()
    assert rref._get_type() is Counter
    sleeper = rpc.remote(to, threading.Event)
    with pytest.raises(CommTimeout):
        sleeper.rpc_sync(timeout=0.05).wait(0.5)


def test_backward_on_the_owner(workers):
    leaf = torch.ones(3, requires_grad=True)
    rpc.RRef((leaf * 2).sum()).backward()
    assert torch.equal(leaf.grad, torch.full((3,), 2.0))
    with pytest.raises(MpidistError, match="should contain a tensor"):
        rpc.RRef("text").backward()
    with pytest.raises(MpidistError, match="Could not find autograd context"):
        rpc.RRef(leaf.sum()).backward(7)


def test_a_dropped_reference_frees_its_value(group, workers, to):
    agent = api._get_current_rpc_agent()
    rref = rpc.remote(to, torch.zeros, args=(1000,))
    rref.to_here()
    group.barrier()
    assert soon(lambda: agent.references.store.counts()[0] == (1 if group.size > 1 else 0))
    group.barrier()
    del rref
    assert soon(lambda: agent.references.store.counts() == (0, 0))
    group.barrier()


def test_a_dropped_value_does_not_wait_for_the_collector(group, workers, to):
    gc.disable()
    try:
        rref = rpc.remote(to, Counter)
        rref.to_here()
        rpc.rpc_sync(to, watch, (rref,))
        group.barrier()
        del rref
        gone = soon(lambda: rpc.rpc_sync(to, all_gone))
        agree(group, gone, "the value is still there")
    finally:
        gc.enable()
    _watched.clear()


_watched: list[weakref.ref] = []


def watch(rref):
    _watched.append(weakref.ref(rref.local_value()))


def all_gone():
    return all(reference() is None for reference in _watched)


@pytest.mark.mpi(min_size=2)
def test_leaks_raise_if_they_are_not_ignored(group):
    rpc.init_rpc(f"worker{group.rank}", group=group)
    kept = rpc.remote((group.rank + 1) % group.size, torch.zeros, args=(1,))
    kept.to_here()
    group.barrier()
    with (
        mock.patch.object(api, "_ignore_rref_leak", False),
        mock.patch.object(api, "_delete_all_user_and_unforked_owner_rrefs"),
        pytest.raises(MpidistError, match="Leaking RRef: 1"),
    ):
        rpc.shutdown()
    with pytest.raises(MpidistError, match="shut down"):
        kept.to_here()
    group.barrier()


def test_references_end_with_shutdown(group, workers, to):
    rref = rpc.remote(to, torch.zeros, args=(1,))
    rref.to_here()
    rpc.shutdown()
    if group.size > 1:
        with pytest.raises(RRefError, match=r"Cannot call to_here\(\) on it after deletion"):
            rref.to_here()
    rpc.init_rpc(f"worker{group.rank}", group=group)
    with pytest.raises(RRefError, match=r"deletion|earlier"):
        rpc.rpc_sync(to, give_back, args=(rref,))
    rpc.shutdown()


def keep(rref):
    _kept.append(rref)


def drop(number):
    if _kept:
        _kept.pop(number % len(_kept))


@pytest.mark.parametrize("seed", range(3))
def test_random_histories_with_delayed_messages(group, seed):
    """Messages are delayed randomly, in order for each pair; at the end all tables are empty."""
    rng = random.Random(1000 * seed + group.rank)
    with network.delayed(rng.random()):
        rpc.init_rpc(f"worker{group.rank}", group=group)
        agent = api._get_current_rpc_agent()
        mine, calls = [], []
        for step in range(60):
            action = rng.random()
            other = rng.randrange(group.size)
            if action < 0.3 or not mine:
                mine.append(
                    (rpc.remote(other, give_back, args=((group.rank, step),)), (group.rank, step))
                )
            elif action < 0.6:
                calls.append(rpc.rpc_async(other, keep, args=(rng.choice(mine)[0],)))
            elif action < 0.75:
                mine.pop(rng.randrange(len(mine)))
            elif action < 0.85:
                calls.append(rpc.rpc_async(other, drop, args=(rng.randrange(100),)))
            else:
                rref, value = rng.choice(mine)
                assert rref.to_here() == value
        for call in calls:
            call.wait()
        wrong = [rref for rref, value in mine if rref.to_here() != value]
        api._wait_all_workers(30)
        values = [rref.to_here() for rref in _kept]
        wrong += [value for value in values if not isinstance(value, tuple)]
        api._wait_all_workers(30)
        mine.clear()
        _kept.clear()
        gc.collect()
        rpc.shutdown(timeout=60)
    agree(
        group,
        not wrong and agent.references.store.counts() == (0, 0),
        f"{wrong} {agent.references.store.counts()}",
    )
