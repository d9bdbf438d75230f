"""Schedule of a ring algorithm; pure."""

from __future__ import annotations

from mpidist.comm.algorithms.ring_schedule import legs


def test_each_shard_of_the_ring_passes_every_rank():
    for size in range(1, 7):
        for longest, chunk in [(0, 4), (1, 4), (9, 4)]:
            # Rank i sends the shard that it received in the previous step; each shard's sum starts
            # at one rank and has W contributions.
            routes = [legs(size, longest, chunk, (rank - 1) % size) for rank in range(size)]
            assert all(len(route) == (size - 1) * -(-longest // chunk) for route in routes)
            for rank, route in enumerate(routes):
                for mine, theirs in zip(route, routes[(rank - 1) % size], strict=True):
                    assert mine.received == theirs.sent and mine.start == theirs.start
                if route:
                    assert route[-1].received == rank
                for earlier, later in zip(route, route[-(-longest // chunk) :], strict=False):
                    assert later.sent == earlier.received
