"""Difference between ranks' calls: the first number at which they differ, and its sentence."""

from mpidist.comm.execution.op_status import Call, History
from mpidist.comm.watchdog import call_difference

REDUCE = Call("all_reduce", (5,), "torch.float32")


def calls(sequence, *names):
    return History(sequence, tuple(map(Call, names)))


def test_the_first_number_with_different_calls_is_found():
    one, two = calls(4, "barrier", "all_reduce", "gather"), calls(3, "barrier", "broadcast")
    number, found = call_difference.first({0: one, 1: two, 2: History(7)})
    assert number == 3 and found == {0: Call("all_reduce"), 1: Call("broadcast")}
    assert call_difference.first({0: one, 1: calls(3, "barrier", "all_reduce")}) is None
    # Without a number in common nothing is said.
    assert call_difference.first({0: one, 1: calls(1, "broadcast"), 2: History(0)}) is None
    assert call_difference.first({}) is None


def test_sizes_count_where_all_ranks_give_one():
    same = {0: History(1, (REDUCE,)), 1: History(1, (REDUCE._replace(shape=(5, 1)),))}
    assert call_difference.first(same) is None
    longer = REDUCE._replace(shape=(6,))
    found = call_difference.first({0: History(1, (REDUCE,)), 1: History(1, (longer,))})
    assert found is not None
    assert call_difference.sentence(found[1]) == (
        "rank 1 called all_reduce(shape=(6,), dtype=torch.float32) where "
        "rank 0 called all_reduce(shape=(5,), dtype=torch.float32)"
    )
    # Of a gather the ranks' tensors may differ.
    each = [History(1, (Call("gather", (size,), "torch.float32"),)) for size in (1, 2)]
    assert call_difference.first(dict(enumerate(each))) is None


def test_what_most_ranks_called_comes_last():
    def said(*names):
        return call_difference.sentence(dict(enumerate(map(Call, names))))

    assert (
        said("all_reduce", "broadcast") == "rank 1 called broadcast where rank 0 called all_reduce"
    )
    assert (
        said("broadcast", "barrier", "barrier", "gather")
        == "rank 0 called broadcast, rank 3 called gather where ranks 1, 2 called barrier"
    )
    assert said(*["barrier"] * 10, "gather").endswith("where ranks 0-9 called barrier")


def test_another_call_at_a_number_is_told_from_an_unknown_one():
    history = calls(3, "barrier", "broadcast")
    assert call_difference.are_different(history, 3, REDUCE)
    assert not call_difference.are_different(history, 3, Call("broadcast"))
    assert not call_difference.are_different(history, 1, REDUCE)
    assert not call_difference.are_different(history, 3, None)
