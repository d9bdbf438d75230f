"""Spool of one process's entries."""

import resource
import time

import pytest

from mpidist.comm.recorder.file_format import SLOT
from mpidist.comm.recorder.ring import Ring
from mpidist.trace import spool as spools
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


@pytest.mark.parametrize("limit", [1, 100, 9_000])
def test_a_full_disk_keeps_what_it_has_taken(monkeypatch, limit):
    monkeypatch.setattr(spools, "_MEMORY_BYTES", 4096)
    ring = Ring(None, slots=512)
    signature = ring.signature("step", "SGD")
    spool = Spool(ring)
    # Its thread reads at times that are not known.
    spool._stop.set()
    spool._thread.join()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        for _ in range(8):
            for _ in range(50):
                ring.end(ring.begin(signature))
            spool._read()
        stored = spool.end()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    numbers = [slot[-1] for slot in SLOT.iter_unpack(stored)]
    # Those in memory, and the whole ones on the disk.
    assert numbers == list(range(1, 100 + limit // 64 + 1))
    assert "took no more: File too large" in spool.problem


def test_looks_follow_the_rate():
    assert next_wait_s(0.02, 0.5) == 0.01
    assert next_wait_s(1e-3, 0.5) == 1e-3
    assert next_wait_s(0.01, 0.0) == 0.02
    assert next_wait_s(0.02, 0.0) == 0.02
    assert next_wait_s(0.01, 0.1) == 0.01
