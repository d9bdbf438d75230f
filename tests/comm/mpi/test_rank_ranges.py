"""Ranks as text: ranges of neighbours, and the end of a long list."""

from mpidist.comm.mpi import rank_ranges


def test_neighbours_are_a_range_from_three_on():
    for ranks, text in (
        ([3], "rank 3"),
        ([2, 1], "ranks 1, 2"),
        ([0, 1, 2], "ranks 0-2"),
        ([127, 0, 4, 3, 5, 126], "ranks 0, 3-5, 126, 127"),
        (range(3, 512), "ranks 3-511"),
    ):
        assert rank_ranges.named(ranks) == text
    assert rank_ranges.named((4, 5), "world rank") == "world ranks 4, 5"


def test_of_many_ranges_the_first_are_named():
    assert rank_ranges.numbers(range(0, 16, 2)) == "0, 2, 4, 6, 8, 10, 12, 14"
    assert rank_ranges.numbers(range(0, 512, 2)) == ("0, 2, 4, 6, 8, 10, 12, 14, ... (256 of them)")
