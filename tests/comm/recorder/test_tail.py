"""Tail of a ring: nothing twice, nothing lost that was not said."""

import inspect
import itertools
import threading

from mpidist.comm.recorder.file_format import SLOT
from mpidist.comm.recorder.recording import entry, read_table
from mpidist.comm.recorder.ring import Ring
from mpidist.comm.recorder.tail import Tail


def made(slots=8):
    ring = Ring(None, slots=slots)
    return ring, ring.signature("step", "SGD")


def numbers(slots):
    return sorted(slot[-1] for slot in SLOT.iter_unpack(slots))


def test_entries_come_once_they_have_ended():
    ring, signature = made()
    ring.end(ring.begin(signature))  # before the tail
    tail = Tail(ring)
    first, second = ring.begin(signature), ring.begin(signature)
    ring.end(second)
    assert numbers(tail.read()) == [3] and numbers(tail.under_way()) == [2]
    assert numbers(tail.read()) == []
    ring.fail(first)
    (slot,) = SLOT.iter_unpack(tail.read())
    read = entry(slot, read_table(ring.copied_table()).signatures)
    assert read.number == 2 and read.operation == "SGD" and read.failed
    assert tail.lost == 0 and tail.last == 3 and not tail.under_way()


def test_overwritten_entries_are_counted():
    ring, signature = made()
    tail = Tail(ring)
    for _ in range(20):
        ring.end(ring.begin(signature))
    assert numbers(tail.read()) == list(range(13, 21)) and tail.lost == 12
    assert numbers(tail.read()) == [] and tail.lost == 12


def test_long_operation_ends_after_its_slot_was_taken():
    ring, signature = made()
    tail = Tail(ring)
    long = ring.begin(signature)
    found = []
    for _ in range(20):
        ring.end(ring.begin(signature))
        found += numbers(tail.read())
    assert numbers(tail.under_way()) == [long]
    ring.end(long)
    assert [*found, *numbers(tail.read())] == [*range(2, 22), long] and tail.lost == 0


def test_number_that_is_being_stored_is_awaited():
    ring, signature = made(slots=64)
    ring.end(ring.begin(signature))
    tail = Tail(ring)
    # A thread has its number, and has not stored its slot.
    taken, _ = next(inspect.getclosurevars(ring.begin).nonlocals["following"])
    ring.end(ring.begin(signature))
    assert numbers(tail.read()) == [taken + 1] and (tail.lost, tail.missing) == (0, 1)
    for _ in range(64):
        ring.end(ring.begin(signature))
    tail.read()
    assert (tail.lost, tail.missing) == (1, 0)


def test_threads_that_record_meanwhile_lose_nothing():
    ring, signature = made(slots=4096)
    tail, found = Tail(ring), []

    def record():
        for _ in range(5000):
            ring.end(ring.begin(signature))

    threads = [threading.Thread(target=record) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        found.append(tail.read())
    found.append(tail.read())
    read = list(itertools.chain.from_iterable(map(numbers, found)))
    assert len(read) == len(set(read)) and len(read) + tail.lost + tail.missing == 15000
