"""Ring: entries, kept ones, the table, and the memory behind them."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from mpidist.comm.recorder import file_format, recording, ring
from mpidist.comm.recorder.ring import Ring


@pytest.fixture
def made(tmp_path):
    ring = Ring(tmp_path / "recorder-2", "job", 2, 4, slots=8)
    yield ring
    ring.close()


def entries(ring):
    return recording.read(ring.path).entries


def test_an_entry_has_what_was_recorded(made):
    world = made.group("world", "world1", range(4))
    one = made.signature("collective", "all_reduce", world, "float32", (3, 2))
    assert made.signature("collective", "all_reduce", world, "float32", (3, 2)) == one
    number = made.begin(one, 7, 24)
    made.end(number)
    failed = made.begin(made.signature("send", "send", world, "int64", ()), 0, 8, 3, 11)
    made.fail(failed)
    open_ = made.begin(made.signature("call", "f"), peer=1, tag=99)
    first, second, third = entries(made)
    assert (first.number, second.number, third.number) == (number, failed, open_) == (1, 2, 3)
    assert first.kind is recording.Kind.COLLECTIVE and first.operation == "all_reduce"
    assert (first.group, first.sequence, first.dtype) == ("world", 7, "float32")
    assert (first.shape, first.size_bytes, first.peer, first.tag) == ((3, 2), 24, -1, 0)
    assert first.thread == threading.get_native_id() and not first.failed
    assert 0 < first.begin_ns <= first.end_ns <= second.begin_ns <= second.end_ns
    assert (second.kind, second.peer, second.tag, second.shape) == ("send", 3, 11, ())
    assert second.failed and third.end_ns is None and not third.failed
    assert (third.tag, third.group, third.dtype) == (99, "", "")


def test_the_ring_holds_the_last_entries_and_those_under_way(made):
    signature = made.signature("collective", "barrier")
    slow = made.begin(signature)
    for _ in range(20):
        made.end(made.begin(signature))
    kept = entries(made)
    assert [one.number for one in kept] == [slow, *range(14, 22)]
    assert kept[0].end_ns is None and all(one.end_ns for one in kept[1:])
    assert recording.read(made.path).overwritten == 12
    made.end(slow)
    assert entries(made)[0].end_ns >= kept[-1].end_ns
    # The place is free again.
    assert not made._kept
    late = [made.begin(signature) for _ in range(8 + ring._KEPT + 3)]
    assert len(entries(made)) == 8 + ring._KEPT and entries(made)[0].number == late[0]
    # An end of what the ring has forgotten changes nothing.
    made.end(late[ring._KEPT])
    assert all(one.end_ns is None for one in entries(made))
    made.fail(late[0])
    assert entries(made)[0].failed


def test_entries_of_one_signature_are_those_of_begin(made):
    signature = made.signature("collective", "all_reduce", "", "int64", (2,))
    begin = made.begins(signature, 16)
    numbers = [made.begin(signature, 3, 16), begin(4), begin(5)]
    made.end(numbers[1])
    first, second, third = entries(made)
    assert [first.number, second.number, third.number] == numbers == [1, 2, 3]
    assert (second.sequence, third.sequence) == (4, 5) and second.end_ns and not third.end_ns
    fields = ("operation", "shape", "size_bytes", "peer", "tag", "thread")
    for name in fields:
        assert getattr(first, name) == getattr(second, name) == getattr(third, name), name


def test_peer_of_an_entry_is_known_at_its_end(made):
    signature = made.signature("receive", "recv")
    slow, quick = made.begin(signature), made.begin(signature)
    made.name_peer(quick, 3)
    made.end(quick)
    for _ in range(8):
        made.end(made.begin(signature))
    made.name_peer(quick, 1)  # its slot is another's
    made.name_peer(slow, 2)
    made.end(slow)
    assert [one.peer for one in entries(made)] == [2] + [-1] * 8


def test_entries_under_way_of_a_part_are_kept_when_it_is_opened(tmp_path):
    made = Ring(tmp_path / "recorder-0", slots=64)  # parts of four
    signature = made.signature("call", "f")
    slow = [made.begin(signature) for _ in range(3)]
    for _ in range(62):
        made.end(made.begin(signature))
    # The first part was opened again, and none of its slots but the first was taken.
    assert list(made._kept) == slow
    made.end(slow[2])
    made.fail(slow[1])
    found = {one.number: one for one in entries(made)}
    assert found[slow[0]].end_ns is None and found[slow[1]].failed and found[slow[2]].end_ns
    for _ in range(2):
        made.end(made.begin(signature))
    found = {one.number: one for one in entries(made)}
    assert found[slow[0]].end_ns is None and found[slow[1]].failed and found[slow[2]].end_ns
    assert list(made._kept) == slow[:1]
    made.close()


def test_a_table_that_fills_keeps_the_names_of_operations(tmp_path, monkeypatch):
    monkeypatch.setattr(ring, "_TABLE_BYTES", 2000)
    made = Ring(tmp_path / "r")
    for size in range(100):
        made.end(made.begin(made.signature("collective", "all_reduce", "", "float32", (size,))))
    first, *_, last = recording.read(tmp_path / "r").entries
    assert first.shape == (0,)
    assert (last.operation, last.dtype, last.shape) == ("all_reduce", "float32", ())
    made.close()


def test_groups_without_room_in_the_table_are_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(ring, "_TABLE_BYTES", 1024)
    made = Ring(tmp_path / "r")
    labels = [made.group("g", f"key {number}", range(2)) for number in range(100)]
    assert labels[:2] == ["g", "g#2"] and labels[-1] == labels[-2]
    assert set(recording.read(tmp_path / "r").groups) == set(labels[: len(made._groups)])
    assert labels[-1] not in labels[: len(made._groups)]
    made.close()


def test_a_full_table_has_one_signature_for_each_kind(tmp_path, monkeypatch):
    monkeypatch.setattr(ring, "_TABLE_BYTES", 1024)
    made = Ring(tmp_path / "recorder-0", slots=4)
    for length in range(30):
        made.end(made.begin(made.signature("step", f"SGD {length}")))
    made.begin(made.signature("commit", "x" * 300))
    *_, step, commit = entries(made)
    assert (step.kind, step.operation) == ("step", file_format.UNLISTED)
    assert (commit.kind, commit.operation, commit.shape) == ("commit", "unlisted", ())
    made.close()


def test_groups_of_one_name_have_labels_of_their_own(made):
    labels = [
        made.group("tp", "world1/a", (0, 2)),
        made.group("tp", "world1/b", (0, 3)),
        made.group("tp", "world1/a", (0, 2)),
        made.group("odd", "world1/c", (1, 2, 5)),
        made.group("down", "world1/d", (9, 6, 3)),
        made.group("one", "world1/e", (4,)),
    ]
    assert labels == ["tp", "tp#2", "tp", "odd", "down", "one"]
    read = recording.read(made.path)
    assert read.groups == {
        "tp": (0, 2), "tp#2": (0, 3), "odd": (1, 2, 5), "down": (9, 6, 3), "one": (4,),
    }  # fmt: skip
    assert read.keys["tp#2"] == "world1/b"


def test_a_recording_is_of_the_last_world_alone(tmp_path):
    made = Ring(tmp_path / "recorder-2", "job", 2, 4, slots=8, world="a")
    label = made.group("world", "a/1", range(4))
    signature = made.signature("collective", "barrier", label)
    for _ in range(3):
        made.end(made.begin(signature))
    before = recording.read(made.path)
    made.move("b", 0, 3)
    assert recording.read(made.path).entries == [] and recording.read(made.path).groups == {}
    assert made.group("world", "b/1", range(3)) == label
    # The shapes of a program stand in the table once.
    assert made.signature("collective", "barrier", label) == signature
    for _ in range(10):
        made.end(made.begin(signature))
    read = recording.read(made.path)
    assert (read.rank, read.size, read.job, read.pid) == (0, 3, "job", os.getpid())
    assert (before.worlds, read.worlds) == (("a",), ("a", "b"))
    assert (before.keys, read.keys) == ({"world": "a/1"}, {"world": "b/1"})
    assert read.groups == {"world": (0, 1, 2)}
    assert [one.number for one in before.entries] == [1, 2, 3] and before.oldest == 1
    assert [one.number for one in read.entries] == list(range(6, 14)) and read.oldest == 6
    assert (before.overwritten, read.overwritten) == (0, 2)
    made.close()


def test_a_full_table_has_room_for_another_world_and_the_end(tmp_path):
    made = Ring(tmp_path / "recorder-0", world="a")
    for number in range(100_000):
        if made._is_full:
            break
        made.signature("step", f"SGD {number}")
    made.move("b", 0, 1)
    made.ended("out of memory")
    read = recording.read(made.path)
    assert read.worlds == ("a", "b") and read.ended.text == "out of memory"
    made.close()


def test_memory_of_the_process_alone_needs_no_file(tmp_path):
    made = Ring(None, slots=4)
    made.end(made.begin(made.signature("step", "SGD")))
    assert made.path is None and not list(tmp_path.iterdir())
    made.close()


def test_memory_that_cannot_be_had_leaves_no_file(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        Ring(tmp_path / "recorder-0")
    assert not list(tmp_path.iterdir())


def test_threads_have_numbers_of_their_own(made):
    signature, numbers = made.signature("step", "SGD"), []

    def record():
        for _ in range(200):
            number = made.begin(signature)
            made.end(number)
            numbers.append(number)

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 801))
    # A thread with the id of an older one may have preempted this one for a whole round.
    assert sum(one.end_ns is not None for one in entries(made)) >= 6


@pytest.mark.parametrize("in_file", [True, False])
def test_a_forked_child_stores_nothing_in_its_parents_memory(tmp_path, in_file):
    made = Ring(tmp_path / "recorder-0" if in_file else None, slots=64)
    signature = made.signature("step", "SGD")
    begin, end, begin_next = made.begin, made.end, made.begins(signature, 8)
    slow = begin(signature)
    held = threading.Event()

    def hold():
        with made._lock:
            held.set()
            time.sleep(0.2)

    # The child has not this thread, which would hold the lock for ever there.
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    before = made._buffer[:]
    child = os.fork()
    if child == 0:
        ended = 1
        try:
            signal.alarm(60)
            end(slow)
            for number in range(200):
                end(begin(made.signature("step", f"step {number}")))
                begin_next(number)
            made.name_peer(slow, 1)
            made.move("b", 1, 2)
            made.ended("reason")
            ended = int(made.path is not None)
        finally:
            os._exit(ended)
    _, status = os.waitpid(child, 0)
    after = made._buffer[:]
    thread.join()
    assert status == 0 and after == before
    end(slow)
    assert made.copied_slots() != before[file_format.HEADER_BYTES :]
    made.close()
    assert made not in ring._rings.alive()


@pytest.mark.slow
def test_threads_that_fork_at_once_leave_no_lock(tmp_path):
    made = Ring(None, slots=64)
    statuses = []

    def fork():
        for _ in range(20):
            child = os.fork()
            if child == 0:
                os._exit(0)
            statuses.append(os.waitpid(child, 0)[1])

    threads = [threading.Thread(target=fork) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = []
    other = threading.Thread(target=lambda: taken.append(made._lock.acquire(timeout=60)))
    other.start()
    other.join()
    assert taken == [True] and statuses == [0] * 80 and not ring._forked
