"""Arrows of made slices."""

from mpidist.comm.recorder.recording import Kind
from mpidist.trace.arrows import Arrows, Group
from mpidist.trace.events import Slice
from tests.trace.made import entry

WORLD = (0, 1, 2)


def arrows(slices, error_ns=0):
    """Return (name, tail rank and time, head rank and time) of each arrow, sorted.

    Args:
        slices: (rank, entry, members of its group); times are those of the entries.
    """
    found = Arrows(error_ns)
    names = []
    for rank, one, members in slices:
        placed = Slice(one, 0, one.begin_ns, one.end_ns)
        names += list(found.add(rank, placed, Group(one.group, members)))
    names += list(found.rest())
    return sorted(
        (one.name, one.tail.rank, one.tail.time_ns, one.head.rank, one.head.time_ns)
        for one in names
    )


def test_last_arrival_points_to_all_others():
    slices = [(rank, entry(10 * rank, 50 + rank), WORLD) for rank in (2, 0, 1)]
    assert arrows(slices) == [("last", 2, 20, 0, 49), ("last", 2, 20, 1, 50)]


def test_operation_within_a_collective_does_not_stand_for_another_rank():
    slices = [(rank, entry(10 + rank, 50), WORLD) for rank in (0, 0, 1, 1, 2, 2)]
    assert arrows(slices) == [("last", 2, 12, 0, 49), ("last", 2, 12, 1, 49)]


def test_groups_of_one_name_are_told_apart():
    slices = [
        (rank, entry(rank, 50, group="half"), members)
        for members in ((0, 1), (2, 3))
        for rank in members
    ]
    assert arrows(slices) == [("last", 1, 1, 0, 49), ("last", 3, 3, 2, 49)]


def test_collective_without_all_ranks_has_no_arrow():
    assert not arrows([(rank, entry(rank, 50), WORLD) for rank in (0, 2)])
    assert not arrows([(0, entry(0, 50), (0,))])


def message(kind, begin, end, peer, tag=5, operation=""):
    return entry(begin, end, kind, operation or kind.value, group="g", peer=peer, tag=tag)


def test_messages_pair_in_their_order():
    slices = [
        (1, message(Kind.RECEIVE, 5, 30, 0), ()),
        (1, message(Kind.RECEIVE, 31, 60, 0), ()),
        (1, message(Kind.RECEIVE, 6, 40, 0, tag=6), ()),
        (0, message(Kind.SEND, 10, 20, 1), ()),
        (0, message(Kind.SEND, 21, 25, 1), ()),
        (0, message(Kind.SEND, 26, 27, 1, tag=6), ()),
        (0, message(Kind.SEND, 26, 27, 2), ()),  # that rank is not in the trace
    ]
    assert arrows(slices) == [
        ("message", 0, 10, 1, 29), ("message", 0, 21, 1, 59), ("message", 0, 26, 1, 39),
    ]  # fmt: skip


def test_objects_pair_apart_from_tensors():
    slices = [
        (0, message(Kind.SEND, 10, 11, 1, operation="send"), ()),
        (0, message(Kind.SEND, 20, 21, 1, operation="send_object"), ()),
        (1, message(Kind.RECEIVE, 30, 35, 0, operation="recv_object"), ()),
        (1, message(Kind.RECEIVE, 40, 45, 0, operation="recv"), ()),
    ]
    assert arrows(slices) == [("message", 0, 10, 1, 44), ("message", 0, 20, 1, 34)]


def test_receive_of_a_send_before_the_trace_has_no_arrow():
    slices = [
        (1, message(Kind.RECEIVE, 0, 8, 0), ()),
        (1, message(Kind.RECEIVE, 9, 60, 0), ()),
        (0, message(Kind.SEND, 10, 20, 1), ()),
    ]
    assert arrows(slices) == [("message", 0, 10, 1, 59)]
    # Within the clocks' error it may be the send's.
    assert arrows(slices, error_ns=5) == [("message", 0, 10, 1, 7)]


def test_receive_from_any_takes_the_oldest_send_that_is_left():
    slices = [
        (2, message(Kind.RECEIVE, 0, 50, -1), ()),
        (2, message(Kind.RECEIVE, 51, 60, 1), ()),
        (2, message(Kind.RECEIVE, 61, 70, -1), ()),
        (0, message(Kind.SEND, 30, 31, 2), ()),
        (1, message(Kind.SEND, 10, 11, 2), ()),
        (1, message(Kind.SEND, 20, 21, 2), ()),
    ]
    assert arrows(slices) == [
        ("message", 0, 30, 2, 69), ("message", 1, 10, 2, 59), ("message", 1, 20, 2, 49),
    ]  # fmt: skip


def test_call_points_to_its_handler_and_back():
    slices = [
        (0, entry(0, 40, Kind.CALL, "f", peer=1, tag=77), ()),
        (1, entry(10, 20, Kind.HANDLER, "f", peer=0, tag=77), ()),
        (1, entry(11, 21, Kind.HANDLER, "f", peer=0, tag=78), ()),  # its call is before the trace
        (2, entry(0, 40, Kind.CALL, "f", peer=1, tag=77), ()),
        (0, entry(0, 40, Kind.BACKWARD, "backward"), ()),
    ]
    assert arrows(slices) == [("answer", 1, 19, 0, 39), ("call", 0, 0, 1, 10)]
