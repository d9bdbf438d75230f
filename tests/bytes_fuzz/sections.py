"""Eager messages, packed sections and RPC headers: valid, damaged, and with random numbers."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from mpidist.comm.transport import eager_message
from mpidist.comm.transport.incoming import Incoming
from mpidist.comm.transport.transport import Transport
from mpidist.errors import FrameError
from mpidist.rpc import message

_MOST = 1 << 20  # announced bytes for which the receives below have memory
_words = st.sampled_from(
    [0, 1, 2, 3, 255, 1 << 15, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 63, (1 << 64) - 1]
) | st.integers(0, 40)


class _Receives:
    """Payload receives without MPI: zeros arrive immediately."""

    def __init__(self) -> None:
        self.lost: list[int] = []

    def refuse(self, source: int, reason: str) -> None:
        """See ``PayloadReceives``."""
        self.lost.append(source)

    def begin(self, one: Incoming, count: int, start: int) -> None:
        """See ``PayloadReceives``."""
        sizes = struct.unpack_from(f"<{count}Q", one.data, start)
        if sum(sizes) > _MOST:
            one.damage = FrameError("too much")
        else:
            one.parts = [memoryview(bytearray(size)) for size in sizes]


def eager_samples() -> list[bytes]:
    """Return valid eager messages: without parts, with packed ones, with payloads, with both.

    The last is continued by another.
    """
    made = []
    for parts in ((), (b"abc", b""), (bytes(20_000),), (b"abc", bytes(20_000), b"d")):
        section, payloads, _ = eager_message.pack_parts(parts, ())
        marks = 0 if section or not parts else eager_message.ALL_PAYLOADS
        fixed = eager_message.FIXED.pack(1, 0, len(payloads) | marks, 0, 5, 0, 6, len(section))
        made.append(
            fixed + struct.pack(f"<{len(payloads)}Q", *map(len, payloads)) + b"header" + section
        )
    continued = eager_message.FIXED.pack(1, 0, 2 | eager_message.CONTINUED, 0, 5, 0, 0, 0)
    return [*made, continued + struct.pack("<2Q", 20, 30)]


def section_samples() -> list[bytes]:
    """Return valid sections of packed parts without payloads."""
    return [
        bytes(eager_message.pack_parts(parts, ())[0])
        for parts in ((b"",), (b"abc", b"d" * 40), (b"",) * 30)
    ]


def header_samples() -> list[bytes]:
    """Return valid headers of RPC messages."""
    rows = [(1, 2, 3), (4, 5, 6)]
    made = [
        message.pack_references(rows),
        message.pack_announced(rows),
        message.pack_words((1, 2, 3)),
    ]
    return [*made, message.COUNT.pack(5) + b"a.b:c", message.GRADIENTS.pack(1, 2, 3, True)]


@st.composite
def damaged(draw: Any, valid: list[bytes]) -> bytes:
    """Draw a sample with bytes changed, removed, or replaced by numbers; or arbitrary bytes."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=100))
    case = bytearray(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, min(len(case), 80)))
        width = draw(st.sampled_from([1, 2, 4, 8]))
        change = (draw(_words) % (1 << 8 * width)).to_bytes(width, "little")
        end = place + (width if draw(st.booleans()) else draw(st.integers(0, 8)))
        case[place:end] = change
    return bytes(case)


def check_eager(case: bytes) -> bool:
    """Decode an eager message as ``Transport.poll`` does; return whether it is valid."""
    here = Transport(None)
    here._payloads = receives = _Receives()  # type: ignore[assignment]
    if len(case) < eager_message.FIXED_BYTES:
        return False
    fields = eager_message.FIXED.unpack_from(case)
    try:
        one = here._accept(3, bytearray(case), fields)
    except FrameError:
        return False
    if one is None:
        return bool(fields[2] & eager_message.CONTINUED) and not receives.lost
    if one.damage is not None:
        assert not one.parts or one.receives
        return False
    assert (
        eager_message.FIXED_BYTES <= one.start <= one.end <= len(one.data) == len(case)
        and not receives.lost
    )
    assert sum(len(part) for part in one.parts) <= len(case) + _MOST
    return True


def check_section(case: bytes, payloads: tuple[int, ...] = ()) -> bool:
    """Unpack a section beside payloads of some sizes; return whether that succeeds."""
    one = Incoming(0, 1, 0, 0, 0, bytearray(), 0, 0)
    one.section, one.parts = case, [memoryview(bytearray(size)) for size in payloads]
    eager_message.unpack_parts(one)
    assert one.section is None
    if one.damage is not None:
        assert isinstance(one.damage, FrameError) and not one.parts
        return False
    assert sum(len(part) for part in one.parts) <= len(case) + sum(payloads)
    return True


def check_header(case: bytes) -> bool:
    """Read a header by each reader; return whether one succeeds.

    None may return more than the header has.
    """
    size, taken = len(case), False
    readers: list[Callable[[], Any]] = [
        lambda: message.unpack_references(case, 0)[0],
        lambda: message.unpack_announced(case, 0)[0],
        lambda: message.unpack_words(case, 0, size),
        lambda: message.unpack_pairs(case, 0, size),
        lambda: message.unpack_ids(case, 0, size, 2),
        lambda: message.unpack_gradients(case, 0, size),
        lambda: message.unpack_name(case, 0, size)[0],
    ]
    for read in readers:
        with contextlib.suppress(FrameError):
            assert len(read()) <= size
            taken = True
    return taken


def samples() -> list[bytes]:
    """Return valid cases of all three kinds, each after the byte of its kind."""
    kinds = {b"e": eager_samples(), b"s": section_samples(), b"h": header_samples()}
    return [kind + case for kind, made in kinds.items() for case in made]


def cases(valid: tuple[bytes, ...] = ()) -> Any:
    """Return a strategy of damaged cases of all three kinds."""
    return damaged(list(valid) or samples())


def check(case: bytes) -> bool:
    """Check a case by its first byte; as a header if that byte is unknown."""
    checks = {b"e": check_eager, b"s": check_section}
    return checks.get(case[:1], check_header)(case[1:])
