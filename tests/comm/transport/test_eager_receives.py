"""Receives of eager messages: none before it is asked for, and none left behind."""

from __future__ import annotations

import pytest

from mpidist.comm.mpi.library import MPI
from mpidist.comm.transport import eager_message
from mpidist.comm.transport.eager_message import EAGER_BYTES
from mpidist.comm.transport.transport import Transport
from tests.comm.transport.test_transport import header_of, receive
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=2)

COUNT = 12  # more messages than posted receives


@pytest.fixture
def made(group):
    transport = Transport(group)
    yield transport
    group.barrier()
    transport.close(1)


def isend(transport, to, data):
    return transport._mpi.Isend([data, MPI.BYTE], to, transport._eager_tag)


def numbered(transport, group, first, count=COUNT):
    """Send numbered messages to all other ranks, every third with a payload."""
    for to in range(group.size):
        for number in range(first, first + count):
            if to != group.rank:
                transport.send(
                    to, 1, number, parts=[bytes([number]) * 100_000] if number % 3 == 0 else ()
                )


def disorder(seen, count):
    """Return the errors in the numbered messages that have arrived."""
    wrong = []
    for source in {one.source for one in seen}:
        ours = [one for one in seen if one.source == source]
        if [one.sequence for one in ours] != list(range(count)):
            wrong.append(f"of rank {source}: {[one.sequence for one in ours]}")
        wrong += [
            f"parts of {one.sequence}"
            for one in ours
            if one.parts and set(bytes(one.parts[0])) != {one.sequence}
        ]
    return wrong


def test_nothing_is_received_before_it_is_asked_for(group, made):
    numbered(made, group, 0)
    group.barrier()
    assert made.poll() is None
    made.open_receives()
    agree(
        group, not (wrong := disorder(receive(made, COUNT * (group.size - 1)), COUNT)), f"{wrong}"
    )


class _Uncancelled:
    """A persistent receive that must not be cancelled: another thread may match it meanwhile."""

    def __init__(self, request):
        self._request = request

    def __getattr__(self, name):
        assert name != "Cancel"
        return getattr(self._request, name)


@pytest.mark.parametrize("polled", [0, 1, 6])
def test_receives_are_withdrawn_without_mpi_cancel(group, made, polled):
    """MPI_Cancel and a match in another thread damage Open MPI's queue of receives."""
    made.open_receives()
    numbered(made, group, 0)
    group.barrier()
    for _ in range(polled):
        made.poll(1)
    started = [request for request, _, _ in made._posted].index(made._started[0])
    made._posted = [(_Uncancelled(request), space, test) for request, space, test in made._posted]
    made._started.append(made._posted[started][0])
    made.close(1)
    assert made.poll(8) is None


@pytest.mark.parametrize("count", [0, 2, 9])
def test_a_closed_transport_leaves_no_receive_and_no_message_of_its_own(group, count):
    transport = Transport(group)
    transport.open_receives()
    group.barrier()
    numbered(transport, group, 0, count)
    group.barrier()
    transport.close(1)
    group.barrier()
    tag, left, status = transport._eager_tag, [], MPI.Status()
    while (message := transport._mpi.Improbe(MPI.ANY_SOURCE, tag, status)) is not None:
        left.append(status.Get_source())
        length = status.Get_count(MPI.BYTE)
        message.Recv((bytearray(length), length, MPI.BYTE))
    payloads = transport._payload_tag
    while (message := transport._mpi.Improbe(MPI.ANY_SOURCE, payloads, status)) is not None:
        length = status.Get_count(MPI.BYTE)
        message.Recv((bytearray(length), length, MPI.BYTE))
    agree(group, group.rank not in left, f"{left}")


def test_a_message_as_long_as_its_receive_arrives(group, made):
    made.open_receives()
    header = bytes(EAGER_BYTES - eager_message.FIXED_BYTES)
    made.send((group.rank + 1) % group.size, 1, header=header)
    (one,) = receive(made, 1)
    agree(group, header_of(one) == header)
