"""Watchdogs of the other ranks: their thread drops what is no message."""

import pytest

from mpidist.comm.mpi.library import MPI
from mpidist.comm.watchdog import watchdog, watchdog_peers
from tests.comm.watchdog.test_watchdog_messages import FOREIGN
from tests.rpc.limits import soon
from tests.tools.support import agree


@pytest.mark.mpi(min_size=2)
def test_the_thread_drops_invalid_messages_and_continues(group, logged):
    dog = watchdog._watchdog

    def dropped():
        return sum("the watchdog drops" in text for text in logged)

    if group.rank == 1:
        for data in FOREIGN.values():
            dog.peers._mpi.Send((data, len(data), MPI.BYTE), 0, watchdog_peers._TAG)
    ok = group.rank != 0 or (soon(lambda: dropped() == len(FOREIGN)) and dog._thread.is_alive())
    agree(group, ok, f"{logged}")
