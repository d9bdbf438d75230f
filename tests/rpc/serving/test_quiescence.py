"""Termination detection over a simulated network: it always ends, and never too early."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.errors import CommTimeout, FrameError
from mpidist.rpc.serving.quiescence import Quiescence


class Worker:
    """One simulated worker: its counts, and what it does with a message."""

    def __init__(self, network, rank):
        self.network = network
        self.rank = rank
        self.pending = self.taken = self.answered = self.started = self.one_way_sent = (
            self.one_way_taken
        ) = 0
        self.is_over = False
        self.error = None
        post = network.post
        self.part = Quiescence(
            rank,
            network.size,
            lambda is_verdict, numbers: (
                network.tell_verdict(tuple(numbers))
                if is_verdict
                else post(rank, 0, ("report", tuple(numbers)))
            ),
            self.totals,
            network.check,
        )

    def totals(self):
        # One look at all of them: as in the library, the parts that grow are read behind those that
        # they are compared with.
        with self.network.lock:
            active = self.pending + self.taken - self.answered
            return active, self.started, self.answered, self.one_way_sent, self.one_way_taken

    def wait(self):
        try:
            self.part.wait(time.monotonic() + 20)
        except BaseException as error:
            self.error = error
        self.is_over = True


class Network:
    """Queues between pairs of workers: each keeps its order, and all overtake each other.

    Args:
        budget: How many calls and one-way messages are sent altogether; every one may cause more
            while some is left.
    """

    def __init__(self, size, seed, budget):
        self.size, self.rng, self.budget = size, random.Random(seed), budget
        # How often something else than a report or a verdict moves: rarely, and whole rounds pass
        # meanwhile.
        self.pace = self.rng.choice([0.01, 0.1, 0.5])
        self.calls = self.rng.choice([0.0, 0.1, 0.5])  # their share in what is sent
        self.lock = threading.RLock()
        self.queues = {(source, to): deque() for source in range(size) for to in range(size)}
        self.running = []  # requests whose handlers have not answered: (worker, caller)
        self.too_early = []
        self.workers = [Worker(self, rank) for rank in range(size)]

    def post(self, source, to, letter):
        with self.lock:
            self.queues[source, to].append(letter)

    def tell_verdict(self, numbers):
        with self.lock:
            # After the verdict to proceed, no message may be in flight or be sent.
            if numbers[1] and self.under_way():
                self.too_early.append(self.under_way())
            for to in range(self.size):
                self.post(0, to, ("verdict", numbers))

    def under_way(self):
        letters = [
            letter
            for queue in self.queues.values()
            for letter in queue
            if letter[0] not in ("report", "verdict")
        ]
        return letters + self.running

    def check(self, deadline, reason):
        if time.monotonic() > deadline:
            raise CommTimeout(reason())

    def send_some(self, worker, most):
        """Have a worker send calls and one-way messages, as long as some may be sent."""
        for _ in range(self.rng.randint(0, most)):
            if not self.budget:
                return
            self.budget -= 1
            to = self.rng.randrange(self.size)
            if self.rng.random() < self.calls:
                worker.started += 1
                worker.pending += 1
                self.post(worker.rank, to, ("call",))
            else:
                worker.one_way_sent += 1
                self.post(worker.rank, to, ("one way",))

    def step(self):
        """Deliver a message, or let a handler answer; return whether there was something to do."""
        with self.lock:
            moves = self.rng.random() < self.pace
            if moves and self.running and self.rng.random() < 0.5:
                worker, caller = self.running.pop(self.rng.randrange(len(self.running)))
                self.send_some(worker, 2)
                self.post(worker.rank, caller, ("answer",))
                worker.answered += 1
                return True
            busy = [
                pair
                for pair, queue in self.queues.items()
                if queue and (queue[0][0] in ("report", "verdict")) != moves
            ]
            if not busy:
                return False
            source, to = self.rng.choice(busy)
            kind, *rest = self.queues[source, to].popleft()
            worker = self.workers[to]
            if kind == "call":
                worker.taken += 1
                self.running.append((worker, source))
            elif kind == "answer":
                # a callback of its future may send more before the call is over
                self.send_some(worker, 1)
                worker.pending -= 1
            elif kind == "one way":
                self.send_some(worker, 2)
                worker.one_way_taken += 1
            elif kind == "report":
                worker.part.receive_report(source, *rest)
            else:
                worker.part.receive_verdict(0, *rest)
            return True

    def run(self, limit_s=30):
        """Run ``wait`` of all workers in threads that start at random times, until all end."""
        with self.lock:
            for worker in self.workers:
                self.send_some(worker, 10)
        late = [threading.Thread(target=worker.wait) for worker in self.workers]
        self.rng.shuffle(late)
        started, deadline = [], time.monotonic() + limit_s
        while not all(worker.is_over for worker in self.workers) and time.monotonic() < deadline:
            if late and self.rng.random() < 0.1:
                started.append(late.pop())
                started[-1].start()
            if not self.step():
                time.sleep(2e-5)
        for thread in started:
            thread.join(limit_s)


@settings(max_examples=6, deadline=None)
@given(size=st.integers(2, 5), seed=st.integers(0, 2**32), budget=st.integers(0, 60))
def test_it_ends_when_nothing_is_under_way_and_not_before(size, seed, budget):
    network = Network(size, seed, budget)
    network.run()
    assert [worker.error for worker in network.workers] == [None] * size
    assert all(worker.is_over for worker in network.workers)
    assert not network.too_early and not network.under_way()


def test_quiescence_is_reached_repeatedly():
    network = Network(3, 5, 40)
    for _ in range(3):
        network.run()
        assert all(worker.is_over and worker.error is None for worker in network.workers)
        for worker in network.workers:
            worker.is_over = False
        network.budget = 20
    assert not network.too_early


def test_two_rounds_in_a_row_must_be_the_same_and_balanced():
    """Reports of one round differ in time: equal counts do not prove an empty network."""
    verdicts = []
    part = Quiescence(0, 2, lambda is_verdict, numbers: verdicts.append(numbers), None, None)
    rounds = [
        ((1, 1, 3, 0), (0, 0, 0, 3), 0),  # balanced, and the first
        ((1, 1, 4, 0), (0, 0, 0, 4), 0),  # balanced, and another
        ((1, 1, 4, 1), (0, 0, 1, 4), 0),
        ((2, 1, 4, 1), (0, 1, 1, 4), 0),  # a call between them
        ((2, 1, 5, 1), (0, 1, 1, 4), 0),
        ((2, 1, 5, 1), (0, 1, 1, 4), 0),  # the same, and one under way
        ((2, 1, 5, 1), (0, 1, 1, 5), 0),
        ((2, 1, 5, 1), (0, 1, 1, 5), 1),
        ((2, 1, 5, 1), (0, 1, 1, 5), 0),  # the next wait begins anew
        ((2, 1, 5, 1), (0, 1, 1, 5), 1),
    ]
    for number, (first, second, verdict) in enumerate(rounds):
        part.receive_report(1, (number, *second))
        assert len(verdicts) == number
        part.receive_report(0, (number, *first))
        assert verdicts[-1] == (number, verdict)


def test_reports_and_verdicts_that_cannot_be_are_refused():
    verdicts = []
    part = Quiescence(0, 2, lambda is_verdict, numbers: verdicts.append(numbers), None, None)
    for rank in range(2):
        part.receive_report(rank, (3, 0, 0, 0, 0))
    assert len(verdicts) == 1
    for numbers in (
        (),
        (4,),
        (4, 0, 0, 0),
        (4, 0, 0, 0, 0, 0),
        (3, 0, 0, 0, 0),
        (2, 0, 0, 0, 0),
        (2000, 0, 0, 0, 0),
    ):
        for rank in range(2):
            with pytest.raises(FrameError):
                part.receive_report(rank, numbers)
    for number in range(4, 900):
        part.receive_report(1, (number, 0, 0, 0, 0))
    # whatever a worker reports, its last word alone is kept
    assert len(part._reports) == 2 and len(verdicts) == 1
    for rank in (1, 0):
        part.receive_report(rank, (4, 0, 0, 0, 0))  # it may have been wrong before
    assert [number for number, _ in verdicts] == [3, 4]
    with pytest.raises(FrameError, match="to rank 1"):
        Quiescence(1, 2, None, None, None).receive_report(0, (0, 0, 0, 0, 0))
    for source, numbers in (
        (1, (0, 1)),
        (0, (0,)),
        (0, ()),
        (0, (0, 1, 1)),
        (0, (0, 1)),
        (0, (2**64 - 1, 1)),
    ):
        with pytest.raises(FrameError):
            part.receive_verdict(source, numbers)
    part._round = 2
    with pytest.raises(FrameError, match="verdict 7"):
        part.receive_verdict(0, (1, 7))
    part.receive_verdict(0, (0, 1))  # of a round that was given up
    assert not part._verdicts
    part.receive_verdict(0, (1, 0))
    assert part._verdicts == {1: 0}


def alone(rank, size, check, active=0):
    """Return one worker's part, without other workers."""
    reports = []
    part = Quiescence(
        rank,
        size,
        lambda is_verdict, numbers: None if is_verdict else reports.append(numbers),
        lambda: (active, 0, 0, 0, 0),
        check,
    )
    part.reports = reports
    return part


def test_the_coordinator_names_a_missing_rank():
    reasons = []

    def check(deadline, reason):
        reasons.append(reason())
        if len(reasons) == 2:
            part.receive_report(1, (0, 0, 0, 0, 0))
        if len(reasons) == 4:
            raise CommTimeout(reasons[-1])

    part = alone(0, 4, check)
    with pytest.raises(CommTimeout, match="waiting for ranks 0, 2, 3"):
        part.wait(math.inf)
    assert reasons[0] == "waiting for ranks 0-3" and part.reports == [(0, 0, 0, 0, 0)]


def test_other_ranks_report_a_silent_coordinator():
    def check(deadline, reason):
        raise CommTimeout(reason())

    with pytest.raises(CommTimeout, match="no verdict from rank 0"):
        alone(2, 4, check).wait(math.inf)


def test_calls_that_do_not_end_are_named():
    def check(deadline, reason):
        raise CommTimeout(reason())

    part = alone(1, 2, check, active=1)
    with pytest.raises(CommTimeout, match="calls or callbacks are under way on this worker"):
        part.wait(math.inf)
    assert part.reports == []


@pytest.mark.parametrize("active", [0, 1])
def test_check_gets_the_deadline(active):
    def check(deadline, reason):
        raise CommTimeout(f"over at {deadline}")

    with pytest.raises(CommTimeout, match=r"over at 12\.5"):
        alone(1, 2, check, active).wait(12.5)


def test_a_worker_that_gives_up_is_named_on_the_others():
    """Only messages are used, so the remaining workers detect the missing one and raise as well."""
    network = Network(3, 1, 0)
    network.workers[2].wait = lambda: setattr(network.workers[2], "is_over", True)
    said = []

    def check(deadline, reason):
        said.append(reason())
        raise CommTimeout(said[-1])

    for worker in network.workers:
        worker.part._check = check
    network.run()
    assert all(isinstance(worker.error, CommTimeout) for worker in network.workers[:2])
    assert any("waiting for rank 2" in text for text in said)
