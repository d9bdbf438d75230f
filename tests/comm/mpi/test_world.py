"""The world's numbers of nodes; pure."""

from mpidist.comm.mpi.world import number_alike


def test_nodes_are_numbered_in_the_order_of_their_first_ranks():
    assert tuple(number_alike(["b", "a", "b", "c", "a"])) == (0, 1, 0, 2, 1)
    assert tuple(number_alike([])) == ()
