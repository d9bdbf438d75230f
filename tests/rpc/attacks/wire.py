"""Attacks below the transport: eager messages and payloads with inconsistent numbers.

These run last, because the sender's later payloads are mismatched afterwards.
"""

from __future__ import annotations

import struct

from mpidist.comm.transport.eager_message import MAX_PAYLOADS
from mpidist.rpc.message import FAR, Kind
from tests.rpc.attacks.attacker import Attacker, Attacks
from tests.rpc.attacks.data import ECHO

attack = Attacks()

REFUSED = "refused a message|FrameError"
_FIXED = struct.Struct("<BBHIQQII")
_ALL_PAYLOADS = 1 << 15
_NAME = struct.pack("<H", len(ECHO)) + ECHO.encode()


def eager(
    attacker: Attacker,
    rest: bytes = b"",
    *,
    kind: int = Kind.CALL_PYTHON,
    flags: int = 0,
    payloads: int = 0,
    generation: int | None = None,
    header: int = 0,
    packed: int = 0,
) -> bytes:
    """Write an eager message; the numbers are what it announces."""
    own = attacker.agent.dispatcher._transport.generation if generation is None else generation
    return _FIXED.pack(kind, flags, payloads, own, 1 << 44, 0, header, packed) + rest


@attack("An eager message without a byte", REFUSED)
def empty(attacker: Attacker) -> None:
    attacker.raw(b"")


@attack("An eager message of 31 bytes", REFUSED)
def short(attacker: Attacker) -> None:
    attacker.raw(eager(attacker)[:31])


@attack("A header of 4 GiB announced", REFUSED)
def header_announced(attacker: Attacker) -> None:
    attacker.raw(eager(attacker, header=0xFFFFFFFF))


@attack("4 GiB of packed parts announced", REFUSED)
def packed_announced(attacker: Attacker) -> None:
    attacker.raw(eager(attacker, packed=0xFFFFFFFF))


@attack("A message of another generation is dropped", "")
def generation(attacker: Attacker) -> None:
    attacker.raw(eager(attacker, _NAME, generation=12345, header=len(_NAME)))


@attack("Packed parts: 2^32 - 1 of them announced", REFUSED)
def section_count(attacker: Attacker) -> None:
    section = b"\xff\xff\xff\xff"
    attacker.raw(eager(attacker, _NAME + section, header=len(_NAME), packed=len(section)))


@attack("Packed parts whose lengths overflow", REFUSED)
def section_lengths(attacker: Attacker) -> None:
    section = struct.pack("<IQQ", 2, (1 << 63) - 1, (1 << 63) - 1)
    attacker.raw(eager(attacker, _NAME + section, header=len(_NAME), packed=len(section)))


@attack("Packed parts longer than what came", REFUSED)
def section_long(attacker: Attacker) -> None:
    section = struct.pack("<IQ", 1, 1000) + b"x"
    attacker.raw(eager(attacker, _NAME + section, header=len(_NAME), packed=len(section)))


@attack("Packed parts shorter than what came", REFUSED)
def section_short(attacker: Attacker) -> None:
    section = struct.pack("<IQ", 1, 1) + b"xyz"
    attacker.raw(eager(attacker, _NAME + section, header=len(_NAME), packed=len(section)))


@attack("Packed parts that name a payload which did not come", REFUSED)
def section_payload(attacker: Attacker) -> None:
    section = struct.pack("<IQ", 1, 1 << 63 | 8)
    attacker.raw(eager(attacker, _NAME + section, header=len(_NAME), packed=len(section)))


@attack(
    "A payload of which 8 of 100,000 bytes come: the rest would be memory of others' messages",
    REFUSED,
)
def payload_short(attacker: Attacker) -> None:
    rest = struct.pack("<Q", 100_000) + _NAME
    message = eager(attacker, rest, flags=FAR, payloads=1 | _ALL_PAYLOADS, header=len(_NAME))
    attacker.raw(message, b"\x90" + b"\0" * 7)


@attack("A payload of more bytes than announced", REFUSED)
def payload_long(attacker: Attacker) -> None:
    rest = struct.pack("<Q", 8) + _NAME
    message = eager(attacker, rest, flags=FAR, payloads=1 | _ALL_PAYLOADS, header=len(_NAME))
    attacker.raw(message, b"\x90" * 4000)


@attack("A payload for a device that is not there", REFUSED)
def payload_device(attacker: Attacker) -> None:
    rest = struct.pack("<Q", 8 | 200 << 56) + _NAME
    attacker.raw(
        eager(attacker, rest, flags=FAR, payloads=1 | _ALL_PAYLOADS, header=len(_NAME)), b"\x90" * 8
    )


@attack("A payload of 2^50 bytes: none comes", REFUSED)
def payload_huge(attacker: Attacker) -> None:
    rest = struct.pack("<Q", 1 << 50) + _NAME
    attacker.raw(eager(attacker, rest, flags=FAR, payloads=1 | _ALL_PAYLOADS, header=len(_NAME)))


@attack("32,767 payloads announced, no room for their sizes", REFUSED)
def payloads_announced(attacker: Attacker) -> None:
    attacker.raw(eager(attacker, payloads=_ALL_PAYLOADS - 1))


@attack("More payloads than a message may have", REFUSED)
def payloads_many(attacker: Attacker) -> None:
    count = MAX_PAYLOADS + 2
    attacker.raw(eager(attacker, struct.pack(f"<{count}Q", *[1] * count), payloads=count))
