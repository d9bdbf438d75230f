"""Comparison of arrivals among watchdogs: on made rings, and in a job with a late rank."""

from types import SimpleNamespace

import pytest

from mpidist.comm.mpi.world import Process
from mpidist.comm.recorder import recorder
from mpidist.comm.recorder.ring import Ring
from mpidist.comm.watchdog import straggler_watch, watchdog_messages
from mpidist.comm.watchdog.arrivals import AllArrivals
from mpidist.comm.watchdog.straggler_watch import ENV_STRAGGLERS, StragglerWatch, interval_s


def test_interval_is_a_minute_or_the_settings():
    assert interval_s({}) == 60.0
    assert interval_s({ENV_STRAGGLERS: " 0.5 "}) == 0.5
    assert interval_s({ENV_STRAGGLERS: "0"}) == 0.0
    for text in ("often", "-1", "inf", "nan"):
        with pytest.raises(ValueError, match="MPIDIST_STRAGGLERS needs a number of seconds"):
            interval_s({ENV_STRAGGLERS: text})


class FakePeers:
    """Peers of one rank, whose messages are given to the others at once."""

    def __init__(self, ranks, left=()):
        self.ranks, self.left, self.arrivals = ranks, dict.fromkeys(left), AllArrivals()
        self.sent = []

    def dead(self):
        return ()

    def send(self, ranks, kind, content):
        data = watchdog_messages.encoded(kind, 0, content)
        kind, _, content = watchdog_messages.decoded(bytearray(data))
        self.sent.append((tuple(ranks), kind))
        for rank in ranks:
            self.ranks[rank].arrivals.add(1 - rank, content)


def run(monkeypatch, waits, left=()):
    """Let two ranks record and look for 3 s, with a collective each 100 ms; return their peers."""
    now = [0.0]
    monkeypatch.setenv(ENV_STRAGGLERS, "2")
    fake = SimpleNamespace(
        monotonic=lambda: now[0], monotonic_ns=lambda: int(now[0] * 1e9), time_ns=lambda: 0
    )
    monkeypatch.setattr(straggler_watch, "time", fake)
    monkeypatch.setattr("mpidist.comm.recorder.ring.time", fake)
    peers = []
    peers += [FakePeers(peers, left), FakePeers(peers, left)]
    rings = [Ring(None), Ring(None)]
    watches = []
    for rank in range(2):
        world = SimpleNamespace(
            size=2, rank=rank, processes=[Process(1, "node0"), Process(2, "node1")]
        )
        watches.append(StragglerWatch(world, peers[rank]))
    labels = [ring.group("dp", "world1", range(2)) for ring in rings]
    for step in range(1, 61):
        for ring, label, wait_s in zip(rings, labels, waits, strict=True):
            now[0] = step * 0.1 - wait_s
            number = ring.begin(ring.signature("collective", "all_reduce", label), step)
            now[0] = step * 0.1
            ring.end(number)
        for ring, watch in reversed(list(zip(rings, watches, strict=True))):
            monkeypatch.setattr(recorder, "of_process", lambda ring=ring: ring)
            watch.look()
    return peers


def test_late_rank_is_logged_once_with_its_node(monkeypatch, caplog):
    peers = run(monkeypatch, (0.03, 0.001))
    (record,) = caplog.records
    assert record.message.startswith("rank 1 on node1 is late at 100% of")
    assert "by 29 ms of a step of 100 ms" in record.message
    assert set(peers[1].sent) == {((0,), "arrivals")} and not peers[0].sent


def test_good_job_logs_nothing(monkeypatch, caplog):
    run(monkeypatch, (0.003, 0.001))
    assert not caplog.records


def test_lowest_rank_that_lives_compares(monkeypatch, caplog):
    peers = run(monkeypatch, (0.03, 0.001), left=[0])
    assert peers[0].sent and not peers[1].sent
    assert len(caplog.records) == 1


def test_recorder_that_is_off_and_interval_of_0_do_nothing(monkeypatch):
    monkeypatch.setattr(recorder, "of_process", lambda: recorder.Off())
    world = SimpleNamespace(size=2, rank=0)
    for text in ("60", "0"):
        monkeypatch.setenv(ENV_STRAGGLERS, text)
        watch = StragglerWatch(world, FakePeers([]))
        watch.look()
        assert watch._own is None
