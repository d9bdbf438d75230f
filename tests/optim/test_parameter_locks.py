"""Mutual exclusion of optimizers that share a parameter."""

from __future__ import annotations

import gc
import threading

import torch

from mpidist.optim import parameter_locks
from mpidist.optim.parameter_locks import ParameterLocks


def locks_of(*parameters):
    locks = ParameterLocks()
    locks.add(parameters)
    return locks


def excludes(first, second):
    """Return whether one waits for the other."""
    entered = threading.Event()

    def enter():
        with second:
            entered.set()

    with first:
        thread = threading.Thread(target=enter)
        thread.start()
        waits = not entered.wait(0.05)
    thread.join(60)
    assert entered.is_set()
    return waits


def test_those_that_share_a_parameter_exclude_each_other():
    a, b, c = (torch.ones(1) for _ in "abc")
    first, second, both, other = locks_of(a), locks_of(b), locks_of(b, a), locks_of(c)
    assert excludes(first, both)
    assert excludes(both, second)
    assert not excludes(first, second)
    assert not excludes(both, other)


def test_parameters_added_later():
    a, b = torch.ones(1), torch.ones(1)
    first, second = locks_of(a), locks_of(b)
    first.add([b])
    assert excludes(second, first)


def test_no_deadlock_in_whatever_order_parameters_came():
    a, b = torch.ones(1), torch.ones(1)
    locks_of(a), locks_of(b)
    pairs, done = [locks_of(a, b), locks_of(b, a)], []

    def run(locks):
        for _ in range(2000):
            with locks:
                pass
        done.append(locks)

    threads = [threading.Thread(target=run, args=(locks,), daemon=True) for locks in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(done) == 2


def test_nothing_is_kept_of_a_parameter_that_is_gone():
    gc.collect()
    before = len(parameter_locks._locks)
    parameter = torch.ones(1)
    locks_of(parameter)
    assert len(parameter_locks._locks) == before + 1
    del parameter
    gc.collect()
    assert len(parameter_locks._locks) == before
