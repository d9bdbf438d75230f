"""Revocation on communicators with and without ULFM."""

import pytest

from mpidist.comm.mpi import revocation


class Communicator:
    """Communicator of an MPI with ULFM."""

    def __init__(self):
        self.is_revoked = False

    def Revoke(self):
        self.is_revoked = True

    def Is_revoked(self):
        return self.is_revoked


class Plain:
    """Communicator of an MPI without ULFM."""

    def Revoke(self):
        raise NotImplementedError

    Is_revoked = Revoke


def test_an_error_of_the_block_revokes():
    comm, plain = Communicator(), Plain()
    with revocation.on_error(comm):
        pass
    assert not revocation.is_revoked(comm) and not revocation.is_revoked(plain)
    for one in (comm, plain):
        with pytest.raises(KeyError), revocation.on_error(one):
            raise KeyError
    assert revocation.is_revoked(comm)
    assert revocation.revoke(comm) and not revocation.revoke(plain)
