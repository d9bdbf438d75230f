"""Messages too long for a worker with a list: rejected before any byte is received."""

from __future__ import annotations

import logging
import struct

import pytest
import torch

import mpidist.rpc as rpc
from mpidist.comm.transport.eager_message import EAGER_BYTES
from mpidist.rpc import api
from mpidist.rpc.message import Kind
from tests.rpc.limits import shut_down
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=2)

_FIXED = struct.Struct("<BBHIQQII")
_ALL_PAYLOADS = 1 << 15
TIMES = 50
LISTED = 0  # the rank of the worker with a list
_log: list[str] = []


def echo(value=None):
    return value


def logged():
    """Return what the worker has refused, and forget it."""
    texts = [text for text in _log if "refused a message" in text]
    _log.clear()
    return texts


class _Handler(logging.Handler):
    def emit(self, record):
        _log.append(record.getMessage())


@pytest.fixture
def workers(group):
    handler = _Handler()
    logging.getLogger("mpidist").addHandler(handler)
    _log.clear()
    rpc.init_rpc(
        f"worker{group.rank}", group=group, allowed=[echo, logged] if group.rank == LISTED else None
    )
    yield group
    shut_down(group)
    logging.getLogger("mpidist").removeHandler(handler)


def ask(function, *args):
    return rpc.rpc_sync(LISTED, function, args=args, timeout=30)


def isend(data, is_payload=False):
    """Send bytes past our transport."""
    transport = api._get_current_rpc_agent().dispatcher._transport
    tag = transport._payload_tag if is_payload else transport._eager_tag
    return transport._mpi.Isend([data, transport._byte], LISTED, tag)


def announcing(*sizes):
    """Return an eager message of an unknown kind that announces payloads."""
    generation = api._get_current_rpc_agent().generation
    header = _FIXED.pack(
        Kind.CALL_PYTHON, 0, len(sizes) | _ALL_PAYLOADS, generation, 1 << 44, 0, 0, 0
    )
    return header + struct.pack(f"<{len(sizes)}Q", *sizes)


def refused_after(send, expected):
    """Send in the last rank; return what is wrong with how the worker with the list took it."""
    seen = []
    requests = send()
    large = torch.arange(100_000)
    wrong = []
    for _ in range(1000):
        # a payload of another message is not among ours
        if not torch.equal(ask(echo, large), large):
            wrong.append("another's payload")
        seen += ask(logged)
        if len(seen) >= expected:
            break
    for request in requests:
        request.Wait()
    return wrong, seen


@pytest.mark.parametrize("nbytes", [EAGER_BYTES + 1, 40_000, 60_000, 1_000_000])
def test_long_eager_messages_are_refused_unread(workers, nbytes):
    wrong, seen = [], []
    if workers.rank == workers.size - 1:
        wrong, seen = refused_after(lambda: [isend(b"\xff" * nbytes) for _ in range(TIMES)], TIMES)
        text = f"a message of {nbytes} bytes from rank {workers.rank}; at most {EAGER_BYTES}"
        if len(seen) != TIMES or not all(text in one for one in seen):
            wrong.append(f"{len(seen)} refused: {seen[:2]}")
    agree(workers, not wrong, f"{wrong}")


@pytest.mark.parametrize(
    ("announced", "sent"),
    [(20, 40_000), (20_000, 300_000), (20_000, 20_001), (0, 5), (3_000_000, 9_000_000)],
)
def test_payloads_longer_than_announced_are_refused_unread(workers, announced, sent):
    def send():
        requests = []
        for _ in range(TIMES):
            requests += [
                isend(announcing(announced, announced)),
                isend(b"\xff" * sent, True),
                isend(bytes(announced), True),
            ]
        return requests

    wrong, seen = [], []
    if workers.rank == workers.size - 1:
        wrong, seen = refused_after(send, TIMES)
        text = f"announced as {announced} bytes: {sent} bytes have arrived"
        if len(seen) != TIMES or not all(text in one for one in seen):
            wrong.append(f"{len(seen)} refused: {seen[:2]}")
    agree(workers, not wrong, f"{wrong}")
