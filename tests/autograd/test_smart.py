"""SMART mode: closures of random message graphs, and the survey's end in any order of answers."""

from __future__ import annotations

import random

import pytest
import torch

from mpidist.autograd.dependencies import Plan
from mpidist.autograd.recording import Receive, Send, received
from mpidist.autograd.smart import Survey, closure, summary


def test_a_summary_names_the_receives_below_each_send():
    (first,), (second,) = (
        received([torch.ones(1, requires_grad=True)]),
        received([torch.ones(1, requires_grad=True)]),
    )
    receives = {first.grad_fn: Receive(11, 1, False, 1), second.grad_fn: Receive(22, 2, True, 1)}
    sends = [
        Send(1, True, [first * 2]),
        Send(1, True, [first + second]),
        Send(1, False, [torch.ones(1, requires_grad=True)]),
    ]
    plan = Plan(dict(zip([7, 8, 9], [send.next_functions for send in sends], strict=True)))
    found = summary(plan, receives)
    assert {name: sorted(hops) for name, hops in found.items()} == {
        7: [(11, 1)],
        8: [(11, 1), (22, 2)],
        9: [],
    }


@pytest.mark.parametrize("seed", range(30))
def test_closures_equal_brute_force(seed):
    rng = random.Random(seed)
    messages = [(message, rng.randrange(4)) for message in range(rng.randint(1, 15))]
    leads = {hop: rng.sample(messages, rng.randint(0, min(3, len(messages)))) for hop in messages}
    summaries = {
        worker: {hop[0]: leads[hop] for hop in messages if hop[1] == worker} for worker in range(4)
    }
    roots = rng.sample(messages, rng.randint(0, len(messages)))
    reached = set(roots)
    while more := {below for hop in reached for below in leads[hop]} - reached:
        reached |= more
    assert {
        (message, worker) for worker, some in closure(summaries, roots).items() for message in some
    } == reached


@pytest.mark.parametrize("seed", range(20))
def test_a_survey_asks_each_worker_once_and_is_complete_once(seed):
    rng = random.Random(seed)
    peers = {worker: set(rng.sample(range(6), rng.randint(0, 3))) for worker in range(6)}
    survey = Survey(0, {}, peers[0])
    expected = {0}
    while more := {other for worker in expected for other in peers[worker]} - expected:
        expected |= more
    waiting, ended = sorted(survey.next()), 0
    asked = list(waiting)
    ended += survey.is_complete()
    while waiting:
        worker = waiting.pop(rng.randrange(len(waiting)))
        if survey.add(worker, {}, peers[worker]):
            new = survey.next()
            asked += new
            waiting += new
            ended += survey.is_complete()
    assert sorted(asked) == sorted(expected - {0}) and ended == 1 and not survey.is_complete()
