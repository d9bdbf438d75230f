"""Protocol of references under random delays: no value is freed early, and none leaks.

The delays keep the order of messages of each pair of ranks.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque

import pytest

from mpidist.errors import FrameError
from mpidist.rpc.rref_store import RRefStore, id_parts, new_id


class Network:
    """Letters between workers: those of one pair in order, all else in any."""

    def __init__(self, rng):
        self.rng = rng
        self.queues = defaultdict(deque)

    def send(self, source, to, act):
        self.queues[source, to].append(act)

    def deliver_one(self):
        busy = [pair for pair, queue in self.queues.items() if queue]
        if not busy:
            return False
        self.queues[self.rng.choice(busy)].popleft()()
        return True


class Worker:
    """A simulated worker; references are (reference, fork, owner), owned ones without fork."""

    def __init__(self, rank, network, workers):
        self.rank, self.network, self.workers = rank, network, workers
        self.store = RRefStore(rank)
        self.held = []
        self.entries = {}  # those that its own code holds

    def remote(self, owner):
        reference, fork = self.store.make_id(), self.store.make_id()
        there = self.workers[owner]

        def arrive():
            there.store.create_for(self.rank, reference, fork).set(("value", reference))

        if owner == self.rank:
            there.store.create(reference, fork)
            arrive()
            self.entries[reference] = self.store.find(reference)
            self.store.delete_fork(reference, fork)
            self.held.append((reference, None, owner))
        else:
            self.network.send(self.rank, owner, arrive)
            self.held.append((reference, fork, owner))

    def share(self, holding, to):
        reference, _, owner = holding
        fork = self.store.make_id()
        there = self.workers[to]
        pairs = []
        if owner == self.rank:
            self.store.keep(self.entries[reference], fork, to)
        elif owner == to:
            pairs = [(reference, fork)]
        else:
            self.network.send(
                self.rank,
                owner,
                lambda: self.workers[owner].store.add_forks([(reference, fork)], to),
            )

        def arrive():
            there.store.add_forks(pairs, to)
            if owner == to:
                there.entries[reference] = there.store.find(reference)
                there.store.delete_fork(reference, fork)
                there.held.append((reference, None, owner))
            else:
                there.held.append((reference, fork, owner))

        self.network.send(self.rank, to, arrive)

    def drop(self, holding):
        self.held.remove(holding)
        reference, fork, owner = holding
        if fork is None:
            if not any(other[0] == reference for other in self.held):
                del self.entries[reference]
        else:
            self.network.send(
                self.rank, owner, lambda: self.workers[owner].store.delete_fork(reference, fork)
            )

    def fetch(self, holding, seen):
        reference, fork, owner = holding
        if fork is None:
            self.entries[reference].when_set(
                lambda entry: seen.append(entry.value == ("value", reference))
            )
        else:
            entry_of = self.workers[owner].store.find
            self.network.send(
                self.rank,
                owner,
                lambda: entry_of(reference).when_set(
                    lambda entry: seen.append(entry.value == ("value", reference))
                ),
            )


def test_random_histories():
    for seed in range(200):
        assert history(seed) == "", f"seed {seed}"


def history(seed):
    """Run one; return what is wrong."""
    rng = random.Random(seed)
    network = Network(rng)
    workers = []
    workers += [Worker(rank, network, workers) for rank in range(rng.choice([2, 3, 4]))]
    seen, asked = [], 0
    for _ in range(rng.choice([30, 200])):
        worker = rng.choice(workers)
        action = rng.random()
        if action < 0.15 or not worker.held:
            worker.remote(rng.randrange(len(workers)))
        elif action < 0.5:
            worker.share(rng.choice(worker.held), rng.randrange(len(workers)))
        elif action < 0.7:
            worker.drop(rng.choice(worker.held))
        elif action < 0.8:
            worker.fetch(rng.choice(worker.held), seen)
            asked += 1
        for _ in range(rng.randrange(4)):
            network.deliver_one()
    while network.deliver_one():
        pass
    # Every fetch has been answered with its value: none was freed before.
    if seen != [True] * asked:
        return f"{asked} fetches, answers {seen}"
    for worker in workers:
        while worker.held:
            worker.drop(rng.choice(worker.held))
    while network.deliver_one():
        pass
    left = [worker.store.counts() for worker in workers]
    return "" if left == [(0, 0)] * len(workers) else f"left: {left}"


def test_the_simulation_notices_a_fork_message_that_is_sent_too_late():
    """Announcing a fork after the message can free a value: the random test must detect it."""

    class Hasty(Worker):
        def share(self, holding, to):
            reference, fork, owner = holding
            if fork is None or owner == to:
                super().share(holding, to)
                return
            self.drop(holding)  # its own fork goes first
            new = self.store.make_id()
            there = self.workers[to]
            self.network.send(self.rank, to, lambda: there.held.append((reference, new, owner)))
            self.network.send(
                self.rank,
                owner,
                lambda: self.workers[owner].store.add_forks([(reference, new)], to),
            )

    lost = 0
    for seed in range(50):
        rng = random.Random(seed)
        network = Network(rng)
        workers = []
        workers += [Hasty(rank, network, workers) for rank in range(3)]
        seen = []
        workers[0].remote(1)
        while network.deliver_one():
            pass
        workers[0].share(workers[0].held[0], 2)
        while network.deliver_one():
            pass
        workers[2].fetch(workers[2].held[0], seen)
        while network.deliver_one():
            pass
        lost += seen != [True]
    assert lost


def test_deletes_are_idempotent_and_may_come_first():
    store = RRefStore(0)
    entry = store.create_for(0, 5, 1)
    entry.set("value")
    store.delete_fork(5, 2)  # of a fork that is announced later
    assert store.counts() == (1, 1)
    store.delete_fork(5, 2)
    store.add_forks([(5, 2)], 3)
    assert store.counts() == (1, 1)
    store.delete_fork(5, 1)
    assert store.counts() == (0, 0) and store.leaks() == []


def test_waiting_for_a_value_costs_no_thread():
    store, seen = RRefStore(0), []
    entry = store.find(9)  # asked for before it is made
    entry.when_set(lambda made: seen.append(made.value))
    assert store.create_for(0, 9, 1) is entry and seen == []
    entry.set(3)
    entry.set(4)  # set once, it stays
    entry.set(error=ValueError())
    assert entry.error is None
    entry.when_set(lambda made: seen.append(made.value))
    assert seen == [3, 3]


def test_the_forks_of_a_worker_that_has_left_are_deleted():
    store = RRefStore(0)
    for number in (1, 2):
        store.create_for(number, new_id(number, 4), new_id(number, 5)).set("value")
    own = store.find(new_id(0, 1))
    own.set("own")
    store.keep(own, new_id(0, 2), 2)  # passed to worker 2
    store.add_forks([(new_id(1, 4), new_id(1, 6))], 3)  # announced by worker 1
    assert store.counts() == (3, 4)
    store.delete_forks_of(2)
    assert store.counts() == (1, 2) and not own.forks
    store.delete_forks_of(1)
    assert store.counts() == (1, 1)
    store.delete_forks_of(3)
    assert store.counts() == (0, 0)


def test_a_message_makes_no_value_that_is_there_or_that_is_not_its_senders():
    store = RRefStore(0)
    own, theirs = new_id(0, 4), new_id(1, 4)
    store.keep(store.find(own), new_id(0, 5), 1)
    store.find(own).set("mine")
    store.create_for(1, theirs, new_id(1, 5))
    store.create_for(1, new_id(1, 8), new_id(1, 9)).set("theirs")
    before = store.counts()
    for source, reference, fork in (
        (1, own, new_id(1, 6)),
        (0, own, new_id(0, 6)),
        (1, theirs, new_id(1, 6)),  # still being made
        (1, new_id(1, 8), new_id(1, 6)),
        (2, theirs, new_id(2, 6)),
        (1, new_id(1, 7), new_id(0, 6)),
        (1, new_id(0, 7), new_id(1, 6)),
        (1, new_id(2, 7), new_id(1, 6)),
    ):
        with pytest.raises(FrameError, match=r"has not made|there is already"):
            store.create_for(source, reference, fork)
        assert store.counts() == before
    assert store.find(own).value == "mine"


def test_a_worker_makes_a_value_for_itself_by_one_message():
    store = RRefStore(0)
    entry = store.create(4, 5)
    assert store.create_for(0, 4, 5) is entry
    with pytest.raises(FrameError, match="there is already"):
        store.create_for(0, 4, 5)


def test_ids_are_unique_over_ranks():
    stores = [RRefStore(rank) for rank in (0, 1, 70_000)]
    ids = [store.make_id() for store in stores for _ in range(100)]
    assert len(set(ids)) == 300 and id_parts(new_id(70_000, 12)) == (70_000, 12)
