"""Spool of one process's entries."""

import time

from mpidist.comm.recorder.file_format import SLOT
from mpidist.comm.recorder.ring import Ring
from mpidist.trace.spool import Spool, next_wait_s


def test_nothing_is_lost_of_what_fills_the_ring_often():
    ring = Ring(None, slots=512)
    signature = ring.signature("step", "SGD")
    ring.end(ring.begin(signature))
    spool = Spool(ring)
    for _ in range(30):
        for _ in range(100):
            ring.end(ring.begin(signature))
        time.sleep(2e-3)
    under_way = ring.begin(signature)
    slots = [slot[-1] for slot in SLOT.iter_unpack(spool.end())]
    assert slots[-1] == under_way and len(set(slots)) == len(slots)
    assert len(slots) + spool.lost == 3001
    assert "MainThread" in spool.threads.values() and not spool.problem


def test_looks_follow_the_rate():
    assert next_wait_s(0.02, 0.5) == 0.01
    assert next_wait_s(1e-3, 0.5) == 1e-3
    assert next_wait_s(0.01, 0.0) == 0.02
    assert next_wait_s(0.02, 0.0) == 0.02
    assert next_wait_s(0.01, 0.1) == 0.01
