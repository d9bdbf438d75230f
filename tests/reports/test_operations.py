"""The last operations of all ranks: their order, and rows of several ranks."""

from mpidist.comm.recorder.recording import Kind
from mpidist.reports import operations
from tests.reports.made import WALL_NS, S, collective, entry, job


def test_one_collective_of_all_ranks_is_one_row():
    made = job(
        [collective(1, 1, 2), collective(2, 3)],
        [collective(1, 1.5, 2), collective(2, 4)],
        [collective(1, 1.2, 2.25), entry(2, Kind.SEND, "send", 3.5, end_s=3.6, peer=1, tag=7)],
    )
    first, second, third = operations.rows(made, 10)
    assert sorted(first.entries) == [0, 1, 2] and first.begin_ns == WALL_NS + S
    assert (first.text, first.ending) == ('all_reduce number 1 of "world" (5,) float32', "1.05 s")
    assert sorted(second.entries) == [0, 1] and second.ending == "under way 17 s"
    assert (third.text, third.ending) == ("send to rank 1 tag 7", "100 ms")


def test_the_last_rows_are_kept_and_all_that_is_under_way():
    early = entry(1, Kind.CALL, "f", 0.5, peer=1, tag=4)
    made = job(
        [early, *(collective(number, number, number + 0.5) for number in range(2, 300))],
        [collective(299, 299, 299.5, failed=True)],
        now_s=400,
    )
    rows = operations.rows(made, 5)
    assert rows[0].text == "f on rank 1" and rows[0].ending == "under way 400 s"
    assert [next(iter(row.entries.values())).sequence for row in rows[1:]] == list(range(295, 300))
    assert rows[-1].ending == "500 ms, failed" and sorted(rows[-1].entries) == [0, 1]


def test_some_ranks_under_way_are_counted():
    (row,) = operations.rows(job([collective(1, 1)], [collective(1, 2, 3)]), 5)
    assert row.ending == "1 of 2 under way 19 s"
