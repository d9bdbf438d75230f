"""Findings of the doctor: groups of ranks by node, and sizes as text; pure."""

from mpidist.cli.finding import by_node, size, values
from tests.cli.test_findings import job


def test_nodes_and_sizes_are_named():
    assert {
        node: [facts.rank for facts in members] for node, members in by_node(job()).items()
    } == {0: [0, 1], 1: [2, 3]}
    assert values(job(), lambda facts: facts.host) == {"n0": (0, 1), "n1": (2, 3)}
    assert [size(count) for count in (-1, 0, 2048, 3 << 20, 5 << 30, 1 << 40)] == [
        "unlimited",
        "0 B",
        "2 KiB",
        "3 MiB",
        "5 GiB",
        "1 TiB",
    ]
