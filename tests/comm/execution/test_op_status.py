"""Status of a group's operations, as the watchdog reads it."""

from types import SimpleNamespace

import pytest
import torch

from mpidist.comm.execution import op_status as journals
from mpidist.comm.execution.op_status import Call, History, Journal


@pytest.fixture
def clock(monkeypatch):
    """Return a list of one number, the time of the journal's clock in seconds."""
    now = [1000.0]
    monkeypatch.setattr(
        journals,
        "time",
        SimpleNamespace(monotonic=lambda: now[0], time_ns=lambda: int(now[0] * 1e9)),
    )
    return now


def test_an_operation_is_described_with_number_shape_dtype_and_time(clock):
    journal = Journal("world", "key")
    assert (
        str(journal.snapshot()[0]) == 'outside any collective of group "world"; there was none yet'
    )
    journal.enter("all_reduce", [torch.zeros(2, 3)])
    assert journal.observe() == 0.0
    clock[0] += 2.5
    assert journal.observe() == 2.5
    entry = journal.snapshot()[0]
    assert (entry.operation, entry.sequence, entry.shape, entry.dtype) == (
        "all_reduce",
        1,
        (2, 3),
        "torch.float32",
    )
    assert (
        'in number 1 all_reduce(shape=(2, 3), dtype=torch.float32) of group "world" for 2.5 s'
        in str(entry)
    )
    journal.leave()
    assert journal.observe() == 0.0
    assert (
        str(journal.snapshot()[0])
        == 'outside any collective of group "world"; the last was number 1, all_reduce'
    )


def test_calls_of_mpidist_itself_are_not_counted():
    journal = Journal("world", "key")

    def one(operation, *notes):
        for note in notes:
            note()
        journal.enter(operation)
        entry = journal.snapshot()[0]
        journal.leave()
        return str(entry)

    assert "in all_gather_object() of mpidist itself of group" in one(
        "all_gather_object", journal.note_own
    )
    assert str(journal.snapshot()[0]).endswith("there was none yet")
    assert "in number 1 all_reduce()" in one("all_reduce")
    own = one("all_gather_object", journal.note_own)
    assert "in all_gather_object() of mpidist itself after number 1 of group" in own
    assert str(journal.snapshot()[0]).endswith("the last was number 1")
    # An operation of several stages counts once, with what mpidist calls in it.
    journal.enter("average")

    def stages():
        assert "in number 2 average/barrier() of group" in one("barrier")
        # Between two of its stages it goes on.
        assert "in number 2 average() of group" in str(journal.snapshot()[0])
        assert "in number 2 average/gather()" in one("gather", journal.note_own)
        assert journal.history() == History(6)
        return 5

    assert journal.within(stages) == 5
    journal.leave()
    assert str(journal.snapshot()[0]).endswith("the last was number 2, average")
    assert "in number 3 barrier()" in one("barrier")


def test_the_time_of_an_operation_of_stages_is_its_own_between_them(clock):
    journal = Journal("world", "key")
    journal.enter("two_stages")

    def stages():
        clock[0] += 1
        journal.enter("barrier")
        journal.leave()
        clock[0] += 3
        return str(journal.snapshot()[0])

    assert journal.within(stages).endswith('two_stages() of group "world" for 4.0 s')
    journal.leave()
    assert str(journal.snapshot()[0]).startswith("outside any collective")


def test_the_last_calls_are_numbered():
    journal = Journal("world", "key")
    assert journal.history() == History(0) and journal.history().call(0) is None
    for size in range(1, 41):
        journal.enter("all_reduce", [torch.zeros(size)], [torch.zeros(size)])
        journal.leave()
    journal.enter("gather", [torch.zeros(2, 3)])
    history = journal.history()
    assert history.sequence == 41 and history.call(41) == Call("gather", (2, 3), "torch.float32")
    assert history.call(40) == Call("all_reduce", (40,), "torch.float32")
    assert history.call(9) == Call("all_reduce", (9,), "torch.float32")
    assert history.call(8) is None and history.call(42) is None
    journal.leave()
    assert journal.history().call(41) == history.call(41)


def test_the_clock_starts_anew_with_each_operation(clock):
    journal = Journal("world", "key")
    journal.enter("barrier")
    journal.observe()
    clock[0] += 5
    journal.leave()
    journal.enter("barrier")
    assert journal.observe() == 0.0
    assert str(journal.snapshot()[0]).startswith("in number 2 barrier()")


def test_waits_for_messages_have_entries_of_their_own():
    journal = Journal("world", "key", queue=range(3))
    journal.enter_wait(1, "recv", torch.zeros(4))
    collective, wait = journal.snapshot()
    assert collective.seconds is None and wait.operation == "recv" and wait.sequence == 0
    assert "recv(shape=(4,)" in str(wait) and "3 queued behind it" in str(wait)
    journal.leave_wait(1)
    assert len(journal.snapshot()) == 1


def test_an_ended_operations_tensor_is_free():
    import weakref

    journal = Journal("world", "key")
    tensor = torch.zeros(3)
    alive = weakref.ref(tensor)
    journal.enter("all_reduce", [tensor], [tensor])
    journal.leave()
    del tensor
    assert alive() is None


def test_the_oldest_creation_under_way_is_returned():
    journal = Journal("world", "key")
    assert journal.creation() == (0, 0.0)
    second = journal.creating("new_group")
    with journal.creating("new_group"):
        first = journal.creation()[0]
        second.__enter__()
        journal.enter_wait(7, "recv", torch.zeros(4))
        assert journal.creation()[0] == first
    assert journal.creation()[0] != first and "in new_group()" in str(journal.snapshot()[1])
    second.__exit__(None, None, None)
    assert journal.creation() == (0, 0.0) and len(journal.snapshot()) == 2


def test_the_last_operations_are_kept_with_bounds_of_their_times(clock, monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "3")
    journal = Journal("world", "key")
    assert journal.recorded() == []
    for number in range(1, 6):
        clock[0] = 1000.0 + number
        journal.enter("all_gather_into_tensor", [torch.zeros(number)], [torch.zeros(2, number)])
        journal.observe()
        clock[0] += 0.5
        if number < 5:
            journal.leave()
    found = journal.recorded()
    assert [one.sequence for one in found] == [2, 3, 4, 5]
    assert [one.is_over for one in found] == [True, True, True, False]
    second, *_, last = found
    operation, inputs, outputs = second.described
    assert operation == "all_gather_into_tensor"
    assert inputs == ((torch.Size([2]), torch.float32),)
    assert outputs == ((torch.Size([2, 2]), torch.float32),)
    # Seen under way at 1002 and 1003: it began after the first had begun, and ended before the
    # third was seen.
    assert second.begun_ns <= 1002e9 and second.ended_ns == 1003e9
    assert last.begun_ns <= 1005e9 and last.ended_ns is None


def test_none_are_kept_where_torch_keeps_none(monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    journal = Journal("world", "key")
    journal.enter("barrier")
    journal.observe()
    assert journal.recorded() == []
    journal.leave()
    journal.observe()
    assert journal.recorded() == []
