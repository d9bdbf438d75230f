"""Revocation of communicators (ULFM): every call on one returns with an error, on all its ranks.

A rank that leaves a collective because another one has died revokes the communicator, or the ranks
that wait for this one would not learn of it. Without ULFM nothing here has an effect.

Source: MPI Forum, User Level Failure Mitigation, MPIX_Comm_revoke.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mpidist.comm.mpi.nonblocking import Mpi


def revoke(mpi: Mpi) -> bool:
    """Revoke a communicator; return False without ULFM, or if it is null."""
    try:
        mpi.Revoke()
    except Exception:  # MPI without ULFM: NotImplementedError, or MPI's own error
        return False
    return True


def is_revoked(mpi: Mpi) -> bool:
    """Return whether a rank has revoked a communicator, as far as this one knows; local."""
    try:
        return bool(mpi.Is_revoked())
    except Exception:  # as above
        return False


@contextlib.contextmanager
def on_error(mpi: Mpi) -> Iterator[None]:
    """Revoke a communicator if the block raises."""
    try:
        yield
    except Exception:
        revoke(mpi)
        raise
