"""Loopback: messages that a rank sends to itself."""

from __future__ import annotations

import pytest

from mpidist.comm.transport.transport import Transport
from tests.comm.transport.test_transport import header_of

pytestmark = pytest.mark.mpi(min_size=1)


def test_a_transport_of_one_worker_needs_no_mpi():
    transport = Transport(None)
    transport.send(0, 1, header=b"to myself", parts=[b"part"])
    one = transport.poll()
    assert (
        one.source == 0
        and header_of(one) == b"to myself"
        and bytes(one.parts[0]) == b"part"
        and transport.poll() is None
    )
