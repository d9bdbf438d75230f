"""Server of the store: invalid requests are dropped, and no reply delays a rank."""

import time

import pytest

from mpidist.comm.mpi.library import MPI
from mpidist.comm.store import key_value_table, rendezvous
from tests.comm.store.test_key_value_table import FOREIGN
from tests.tools.support import agree


@pytest.mark.mpi(min_size=2)
def test_the_server_drops_invalid_requests_and_continues(group, store, logged):
    server = rendezvous.shared_store()
    if group.rank == 1:
        for data in FOREIGN.values():
            server._mpi.Send((data, len(data), MPI.BYTE), 0, rendezvous.REQUEST_TAG)
        store.set("still", "there")
    agree(group, store.get("still") == b"there")
    warnings = [text for text in logged if "is no request" in text]
    agree(
        group,
        group.rank != 0
        or (len(warnings) == len(FOREIGN) and all("of rank 1, " in text for text in warnings)),
        str(warnings),
    )


@pytest.mark.mpi(min_size=2)
def test_a_reply_that_a_client_does_not_receive_delays_no_rank(group, store):
    server = rendezvous.shared_store()
    if group.rank == 1:
        store.set("large", b"x" * (8 << 20))
        number = next(server._numbers)
        data = key_value_table.request(number, "compare_set", ("untaken", b"", b"y" * (8 << 20)))
        server._mpi.Send((data, len(data), MPI.BYTE), 0, rendezvous.REQUEST_TAG)
    group.barrier()
    store.set(f"rank{group.rank}", "here")
    agree(group, all(store.get(f"rank{rank}") == b"here" for rank in range(group.size)))
    if group.rank == 1:  # received in the end, so that the job can end
        while server._receive(number) is None:
            time.sleep(1e-3)
        server.delete_key("untaken")
