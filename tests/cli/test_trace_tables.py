"""Printed figures of a timeline."""

import io

from mpidist.cli.tables import console
from mpidist.cli.trace_tables import duration, print_summary
from mpidist.trace.summary import Bandwidth, RankFigures, Summary, Wait


def printed(summary):
    file = io.StringIO()
    print_summary(summary, console(file))
    return file.getvalue()


def test_figures_fit_eighty_columns():
    text = printed(
        Summary(
            [
                RankFigures(rank, f"node{rank}[x]", 100, 50, 1500.0 * rank, 2e6, 250.0, 1000.0)
                for rank in range(2)
            ],
            [Bandwidth("all_reduce", 1 << 20, 100, 250.0, 4.2, "ring")],
            [Wait(0.5, 0, "all_reduce", "world", 7, 1, 1.5e6), Wait(0.1, 1, "recv", "", 0, -1, 0)],
            ["rank 1 on node1 is late"],
            ["1 of 3 ranks are not in the trace"],
        )
    )
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[:2] == [
        "straggler: rank 1 on node1 is late",
        "note: 1 of 3 ranks are not in the trace",
    ]
    words = [line.split() for line in lines]
    assert ["1", "node1[x]", "100", "50%", "1.5", "ms", "2", "s", "25%"] in words
    assert ["all_reduce", "1", "MiB", "100", "250", "us", "4.2", "ring"] in words
    assert ["0", "500", "ms", "1", "all_reduce", "7", "world", "1.500", "s"] in words
    assert ["1", "100", "ms", "any", "recv", "0.000", "s"] in words


def test_of_many_ranks_the_latest_are_printed():
    ranks = [RankFigures(rank, "n", 0, 0, float(rank), 0.0, 0.0, 0.0) for rank in range(100)]
    text = printed(Summary(ranks, [], []))
    assert (
        "ranks (32 of 100, the latest)" in text and "\n  99  n" in text and "\n   5  n" not in text
    )


def test_times_have_units():
    assert list(map(duration, (2.5e6, -1500.0, 12.34))) == ["2.5 s", "-1.5 ms", "12.3 us"]
