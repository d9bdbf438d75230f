"""Buddies and the copies of a load, on drawn nodes."""

import random

import pytest

from mpidist.checkpoint.buddies import buddy_of, copies, members


def test_a_buddy_is_on_the_next_node():
    assert [buddy_of(rank, (0, 0, 1, 1)) for rank in range(4)] == [2, 3, 0, 1]
    assert [buddy_of(rank, (0, 0, 0, 1)) for rank in range(4)] == [3, 3, 3, 0]
    assert [buddy_of(rank, (0, 1, 2)) for rank in range(3)] == [1, 2, 0]
    assert buddy_of(0, (0, 0)) is None


@pytest.mark.parametrize("seed", range(20))
def test_after_the_copies_each_node_holds_what_its_ranks_want(seed):
    draw = random.Random(seed)
    nodes = [draw.randrange(3) for _ in range(draw.randint(1, 6))]
    names = [f"file{number}" for number in range(5)]
    of_node = {node: set(draw.sample(names, draw.randint(0, 5))) for node in nodes}
    wanted = [draw.sample(names, draw.randint(0, 3)) for _ in nodes]
    there = set().union(*of_node.values())
    if not {name for table in wanted for name in table} <= there:
        with pytest.raises(LookupError):
            copies(wanted, [of_node[node] for node in nodes], nodes)
        return
    for name, source, dest in copies(wanted, [set(of_node[node]) for node in nodes], nodes):
        assert name in of_node[nodes[source]] and name not in of_node[nodes[dest]]
        assert dest == members(nodes[dest], nodes)[0]
        of_node[nodes[dest]].add(name)
    assert all(set(table) <= of_node[node] for table, node in zip(wanted, nodes, strict=True))
