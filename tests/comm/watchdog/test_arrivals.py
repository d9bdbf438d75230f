"""Arrivals: of a made ring, and of ranks that tell each other."""

from mpidist.comm.recorder import ring as rings
from mpidist.comm.recorder.ring import Ring
from mpidist.comm.watchdog.arrivals import MOST, AllArrivals, OwnArrivals, thinned


class Rank:
    """A rank with a ring, whose collectives take a given time."""

    def __init__(self, monkeypatch, rank, size=3):
        self.now = 10**9
        monkeypatch.setattr(rings.time, "monotonic_ns", lambda: self.now)
        self.ring = Ring(None, slots=4096)
        self.rank = rank
        self.label = self.ring.group("dp", "world1", range(size))
        self.own = OwnArrivals(self.ring)
        self.sequence = 0

    def collective(self, wait_ns, operation="all_reduce", compute_ns=1000):
        self.now += compute_ns
        self.sequence += 1
        signature = self.ring.signature("collective", operation, self.label, "float32", (4,))
        number = self.ring.begin(signature, self.sequence)
        self.now += wait_ns
        self.ring.end(number)


def test_own_arrivals_are_the_times_in_collectives(monkeypatch):
    rank = Rank(monkeypatch, 0)
    for _ in range(12):
        rank.collective(100)
        rank.collective(7, "broadcast")  # which ranks leave early
    rank.ring.begin(rank.ring.signature("collective", "all_reduce", rank.label), 99)
    rank.own.look()
    (told,) = rank.own.told()
    assert (told.key, told.label, told.size) == ("world1", "dp", 3)
    assert told.by_number() == {number: 100 for number in range(1, 24, 2)}
    # The two operations repeat.
    assert told.step_ns == 2107
    rank.own.look()
    assert rank.own.told() == []


def test_step_of_an_optimizer_is_taken_where_it_is_recorded(monkeypatch):
    rank = Rank(monkeypatch, 0)
    step = rank.ring.signature("step", "OSS")
    for _ in range(4):
        for _ in range(5):
            rank.collective(100)
        rank.ring.end(rank.ring.begin(step))
    rank.own.look()
    assert rank.own.told()[0].step_ns == 5500


def test_choices_of_ranks_are_parts_of_each_other():
    some, more = thinned(dict.fromkeys(range(300), 1)), thinned(dict.fromkeys(range(1000), 1))
    assert len(some) <= MOST and len(more) <= MOST
    assert set(more) & set(range(300)) <= set(some)


def told(monkeypatch, waits, count=40):
    found = []
    for rank, wait in enumerate(waits):
        one = Rank(monkeypatch, rank, len(waits))
        for number in range(count):
            one.collective(wait(number))
        one.own.look()
        found.append(one.own.told())
    return found


def test_rank_that_waits_least_is_the_straggler_once(monkeypatch):
    by_rank = told(monkeypatch, [lambda n: 900, lambda n: 100, lambda n: 890])
    everything = AllArrivals()
    for rank, one in enumerate(by_rank[:2]):
        everything.add(rank, one)
    assert everything.found() == []  # rank 2 has not told yet
    everything.add(2, by_rank[2])
    (finding,) = everything.found()
    assert finding.straggler.rank == 1 and finding.straggler.late_ns == 790
    assert finding.label == "dp" and finding.straggler.collectives == 40
    for rank, one in enumerate(by_rank):
        everything.add(rank, one)
    assert everything.found() == []  # it was named


def test_good_job_has_none(monkeypatch):
    by_rank = told(monkeypatch, [lambda n: 900, lambda n: 890 - n % 3, lambda n: 895])
    everything = AllArrivals()
    for rank, one in enumerate(by_rank):
        everything.add(rank, one)
    assert everything.found() == []


def test_what_other_ranks_never_tell_is_forgotten(monkeypatch):
    by_rank = told(monkeypatch, [lambda n: 900, lambda n: 890])
    everything = AllArrivals()
    everything.add(0, by_rank[0])
    for _ in range(3):
        assert everything.found() == []
    assert not everything._groups
