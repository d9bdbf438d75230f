"""Changes between posted and probed receives: no message is lost, reordered or written too far."""

from __future__ import annotations

import pytest

from mpidist.comm.mpi.library import MPI
from mpidist.comm.transport import eager_message
from mpidist.comm.transport import transport as transport_module
from mpidist.comm.transport.eager_message import EAGER_BYTES
from mpidist.comm.transport.eager_receives import ProbedReceive
from mpidist.comm.transport.transport import Transport
from mpidist.errors import FrameError
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
    made.open_receives(is_probing=False)
    agree(
        group, not (wrong := disorder(receive(made, COUNT * (group.size - 1)), COUNT)), f"{wrong}"
    )


@pytest.mark.parametrize(
    "ways", [(False, True), (True, False), (False, True, False, True), (True, True), (False, False)]
)
@pytest.mark.parametrize("polled", [0, 1, 3, 5])
def test_messages_keep_their_order_over_changes(group, made, ways, polled):
    seen = []
    for turn, is_probing in enumerate(ways):
        made.open_receives(is_probing)
        numbered(made, group, turn * COUNT)
        group.barrier()
        for _ in range(polled):
            if (one := made.poll(1)) is not None and one.is_new:
                one.is_new = False
                seen.append(one)
    total = COUNT * len(ways)
    seen += receive(made, total * (group.size - 1) - len(seen))
    agree(group, not (wrong := disorder(seen, total)), f"{wrong}")


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
    made.open_receives(is_probing=False)
    numbered(made, group, 0)
    group.barrier()
    seen = []
    for _ in range(polled):
        if (one := made.poll(1)) is not None and one.is_new:
            one.is_new = False
            seen.append(one)
    made._posted = [(_Uncancelled(request), space, test) for request, space, test in made._posted]
    if made._consumed is not None:
        place = (made._next - 1) % transport_module._RECEIVES
        made._consumed = made._posted[place][0]
    made.open_receives(is_probing=True)
    seen += receive(made, COUNT * (group.size - 1) - len(seen))
    # None of the transport's messages to itself is left.
    group.barrier()
    agree(group, made.poll(8) is None and not (wrong := disorder(seen, COUNT)), f"{wrong}")


@pytest.mark.parametrize("count", [0, 2, 9])
def test_a_closed_transport_leaves_no_receive_and_no_message_of_its_own(group, count):
    transport = Transport(group)
    transport.open_receives(is_probing=False)
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


def test_a_message_under_way_comes_before_those_of_posted_receives(group, made):
    """A probed receive has matched the message; the change takes effect after it."""
    made.open_receives(is_probing=True)
    request = _Held()
    request.space = made._probed.space
    made._probed._request, made._probed._is_idle = request, False
    made.open_receives(is_probing=False)
    assert made.poll(8) is None and made._probed is not None
    numbered(made, group, 0)
    group.barrier()
    assert made.poll(8) is None
    request.is_over = True
    one = made.poll(8)
    assert one is not None and header_of(one) == b"held" and one.source == 0
    assert (
        made.poll(8) is None
        and made._probed is None
        and len(made._posted) == transport_module._RECEIVES
    )
    agree(
        group, not (wrong := disorder(receive(made, COUNT * (group.size - 1)), COUNT)), f"{wrong}"
    )


class _Held:
    """An MPI receive that completes when the test sets it."""

    is_over = False

    def Test(self, status):
        if self.is_over:
            data = eager_message.FIXED.pack(1, 0, 0, 0, 0, 0, 4, 0) + b"held"
            self.space[: len(data)] = data
            status.Set_source(0)
            status.Set_elements(MPI.BYTE, len(data))
        return self.is_over


@pytest.mark.parametrize("nbytes", [EAGER_BYTES + 1, 300_000])
def test_what_is_too_long_is_refused_and_the_next_ones_arrive(group, made, nbytes):
    made.open_receives(is_probing=True)
    to = (group.rank + 1) % group.size
    space = made._probed.space
    space[:] = b"\x55" * EAGER_BYTES
    requests = [isend(made, to, b"\xff" * nbytes) for _ in range(3)]
    made.send(to, 1, header=b"behind")
    errors, one = [], None
    while one is None:
        try:
            one = made.poll()
        except FrameError as error:
            errors.append(str(error))
            assert space == b"\x55" * EAGER_BYTES
    for request in requests:
        request.Wait()
    source = (group.rank - 1) % group.size
    expected = [
        f"a message of {nbytes} bytes from rank {source}; at most {EAGER_BYTES} are received in one"
    ] * 3
    agree(group, (errors, header_of(one)) == (expected, b"behind"), f"{errors}")


def test_a_message_as_long_as_its_receive_arrives(group, made):
    made.open_receives(is_probing=True)
    header = bytes(EAGER_BYTES - eager_message.FIXED_BYTES)
    made.send((group.rank + 1) % group.size, 1, header=header)
    (one,) = receive(made, 1)
    agree(group, header_of(one) == header)


def test_errors_of_withdrawn_receives_are_raised_in_their_place():
    receive = ProbedReceive(
        MPI.COMM_SELF, 1, [(0, b"first"), (0, FrameError("too long")), (0, b"second")]
    )
    status = MPI.Status()
    assert (
        receive.Test(status) and receive.space[:5] == b"first" and status.Get_count(MPI.BYTE) == 5
    )
    with pytest.raises(FrameError, match="too long"):
        receive.Test(status)
    assert receive.Test(status) and receive.space[:6] == b"second" and not receive.Test(status)
