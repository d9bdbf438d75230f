"""Register of scratch memory: keys of dictionaries; pure."""

from mpidist.comm.mpi.scratch import Scratch


def test_uses_are_different_keys_whose_hash_is_an_ints():
    assert len({use: None for use in Scratch}) == len(Scratch)
    assert all(hash(use) == hash(int(use)) for use in Scratch)
    assert Scratch.__hash__ is int.__hash__
