"""Payloads that differ from their announcement: damage for their message, order for later ones."""

from __future__ import annotations

import struct

import pytest

from mpidist.comm.memory import buffer
from mpidist.comm.transport import eager_message, payload_receives
from mpidist.errors import FrameError
from tests.comm.transport.test_transport import header_of, receive, transport
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=2)
__all__ = ["transport"]  # a fixture
_kept = []  # sends that are never received keep their memory


def forged(sizes, header=b"", packed=b"", kind=1, marks=0, count=None, lengths=(0, 0), sequence=7):
    """Return an eager message that announces payloads of these sizes.

    ``lengths`` are added to those of header and section.
    """
    count = len(sizes) if count is None else count
    fixed = eager_message.FIXED.pack(
        kind, 0, count | marks, 0, sequence, 0, len(header) + lengths[0], len(packed) + lengths[1]
    )
    return fixed + struct.pack(f"<{len(sizes)}Q", *sizes) + header + packed


def post(transport, to, message, *payloads):
    """Send bytes as an eager message, and others as payloads."""
    byte = payload_receives.MPI.BYTE
    for data, tag in (
        (message, transport._eager_tag),
        *((payload, transport._payload_tag) for payload in payloads),
    ):
        transport._sending.append((transport._mpi.Isend([data, byte], to, tag), data))


ALL = eager_message.ALL_PAYLOADS
LARGE = 300_000
DEVICE = 1 << payload_receives.DEVICE_SHIFT
# Name: (eager message, payloads, a part of the reason, later payloads of this rank can still be
# received)
DAMAGED = {
    "a payload that is too short": (
        forged([LARGE], marks=ALL),
        [bytes(LARGE - 1)],
        "announced as 300000 bytes",
        True,
    ),
    "no bytes at all": (
        forged([LARGE], marks=ALL),
        [b""],
        "announced as 300000 bytes: 0 bytes",
        True,
    ),
    "the first of three": (
        forged([LARGE] * 3, marks=ALL),
        [bytes(20), *[bytes(LARGE)] * 2],
        "20 bytes have arrived",
        True,
    ),
    "memory that there is not": (
        forged([1 << 43], marks=ALL),
        [bytes(LARGE)] * (1 << 13),
        "in host memory",
        True,
    ),
    "a device that there is not": (
        forged([LARGE | 200 * DEVICE], marks=ALL),
        [bytes(LARGE)],
        "on device 199",
        True,
    ),
    "the last device": (
        forged([20 | 255 * DEVICE, LARGE], marks=ALL),
        [bytes(20), bytes(LARGE)],
        "on device 254",
        True,
    ),
    "a section that says more": (
        forged([], packed=struct.pack("<IQ", 1, 9)),
        [],
        "packed bytes do not hold",
        True,
    ),
    "a section cut off": (
        forged([20]),
        [struct.pack("<I", 1 << 30) + bytes(16)],
        "do not hold what it announces",
        True,
    ),
    "more than any memory": (
        forged([1 << 55] * 3, marks=ALL),
        [bytes(20)] * 3,
        "announced 108086391056891904 bytes",
        False,
    ),
    "a header beyond the end": (
        forged([LARGE], lengths=(9, 0)),
        [bytes(LARGE)],
        "announces 1 payloads",
        False,
    ),
    "packed parts beyond the end": (
        forged([], b"header", b"", lengths=(0, 2**31)),
        [],
        "2147483648 packed ones",
        True,
    ),
    "sizes cut off": (forged([20], count=400), [bytes(20)], "announces 400 payloads", False),
    "too many": (forged([0] * 600, marks=ALL), [b""] * 600, "announces 600 payloads", False),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_messages_are_returned_with_the_reason_and_the_next_ones_arrive(
    monkeypatch, group, transport, name
):
    """Announced and sent payloads differ; later messages arrive, and no memory is mixed up."""
    message, payloads, reason, keeps_order = DAMAGED[name]
    if name == "memory that there is not":
        acquire = payload_receives.BufferPool.acquire
        monkeypatch.setattr(
            payload_receives.BufferPool,
            "acquire",
            lambda self, nbytes: acquire(self, nbytes) if nbytes < 1 << 40 else 1 / 0,
        )
        monkeypatch.setattr(buffer, "MAX_COUNT", 1 << 40)
        payloads = payloads[:8]
    if group.rank == 0:
        for to in range(1, group.size):
            post(transport, to, message, *payloads)
            transport.send(to, 1, header=b"with parts", parts=[bytes(range(250)) * 400])
            transport.send(to, 1, header=b"without")
    else:
        seen = receive(transport, 3)
        damaged, with_parts, without = seen
        agree_all = [
            (damaged.kind, damaged.sequence, damaged.source) == (1, 7, 0)
            and reason in str(damaged.damage)
            and not damaged.parts,
            header_of(without) == b"without" and without.damage is None,
            header_of(with_parts) == b"with parts",
            [bytes(part) for part in with_parts.parts] == [bytes(range(250)) * 400]
            if keeps_order
            else "received no more" in str(with_parts.damage),
        ]
    agree(
        group,
        group.rank == 0 or all(agree_all),
        f"{group.rank and (agree_all, [str(one.damage) for one in seen])}",
    )
    _kept.extend(transport._sending)
    transport._sending.clear()


MORE = eager_message.CONTINUED
# Name: (the eager message that the next one continues, its payloads, a part of the reason, polls
# that raise, later payloads of this rank can still be received)
CONTINUED = {
    "a payload that is too short": (
        forged([20, LARGE], marks=MORE),
        [bytes(20), bytes(9)],
        "announced as 300000 bytes: 9",
        0,
        True,
    ),
    "a device that there is not": (
        forged([LARGE | 200 * DEVICE], marks=MORE),
        [bytes(LARGE)],
        "on device 199",
        0,
        True,
    ),
    "more than any memory, with the last": (
        forged([(1 << 44) - LARGE, LARGE], marks=MORE),
        [b""] * 17,
        f"announced {(1 << 44) + LARGE} bytes",
        0,
        False,
    ),
    "sizes cut off": (forged([20], count=400, marks=MORE), [bytes(20)], "400 payloads", 1, False),
    "too many": (forged([0] * 600, marks=MORE), [b""] * 600, "600 payloads", 1, False),
    "nothing announced": (forged([], marks=MORE), [], "", 0, True),
}


@pytest.mark.parametrize("name", CONTINUED)
def test_damage_in_an_earlier_eager_message_is_that_of_the_whole(
    monkeypatch, group, transport, name
):
    first, payloads, reason, n_raised, keeps_order = CONTINUED[name]
    acquire = payload_receives.BufferPool.acquire
    monkeypatch.setattr(
        payload_receives.BufferPool,
        "acquire",
        lambda self, nbytes: acquire(self, nbytes) if nbytes < 1 << 40 else 1 / 0,
    )
    monkeypatch.setattr(buffer, "MAX_COUNT", 1 << 40)
    if group.rank == 0:
        for to in range(1, group.size):
            post(transport, to, first)
            transport.send(to, 1, header=b"between")
            post(transport, to, forged([LARGE], b"last", marks=ALL), *payloads, bytes(LARGE))
            transport.send(to, 1, header=b"with parts", parts=[bytes(range(250)) * 400])
        found = []
    else:
        raised, seen = [], []
        while len(seen) < 3 or not all(one.is_complete for one in seen[1:]):
            try:
                one = transport.poll()
            except FrameError as error:
                raised.append(reason in str(error))
                continue
            if one is not None and one.is_new:
                one.is_new = False
                seen.append(one)
        between, last, with_parts = seen
        found = [
            raised == [True] * n_raised,
            header_of(between) == b"between" and between.damage is None,
            header_of(last) == b"last" and bool(reason) == (last.damage is not None),
            reason in str(last.damage),
            [len(part) for part in last.parts] == ([] if reason else [LARGE]),
            [bytes(part) for part in with_parts.parts] == [bytes(range(250)) * 400]
            if keeps_order
            else "received no more" in str(with_parts.damage),
        ]
    agree(group, all(found), f"{found}")
    _kept.extend(transport._sending)
    transport._sending.clear()


def test_what_another_message_has_left_in_lent_memory_is_not_handed_out(group, transport):
    secrets = []
    if group.rank == 0:
        for to in range(1, group.size):
            transport.send(to, 1, parts=[b"secret" * 50_000])
    else:
        secrets = [bytes(one.parts[0][:6]) for one in receive(transport, 1)]
    agree(group, secrets in ([], [b"secret"]), "the first message")
    if group.rank == 0:
        for to in range(1, group.size):
            post(transport, to, forged([LARGE], marks=ALL), b"short")
    else:
        (damaged,) = receive(transport, 1)
    agree(group, group.rank == 0 or (damaged.damage is not None and not damaged.parts), "damaged")
