"""Eager message: the layout of a fixed part, the sizes of payloads, a header and packed parts.

::

    kind u8 | flags u8 | payloads n u16 (bit 15: no part is packed; bit 14: continued)
    generation u32 | sequence u64 | context u64 | header bytes u32 | packed bytes u32     (32 bytes)
    n payloads: bytes u64; the top byte is the device index + 1, 0 for host memory
    header
    section: parts m u32 | m × u64 (bytes; top bit: a payload) | the packed parts, end to end

The section is empty if all parts are payloads. A section that does not fit into the eager message
travels as the first payload. A part on a device, or for one, is never packed.

A message with more than ``MAX_PAYLOADS`` payloads has several eager messages, one after the other:
each announces ``MAX_PAYLOADS`` sizes and is marked as continued, and the last announces the others
and has the header and the section.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from mpidist.comm.memory import buffer
from mpidist.comm.serialization.tensor_format import Part
from mpidist.comm.transport.incoming import Incoming, nbytes_of
from mpidist.errors import FrameError

EAGER_BYTES = 32 << 10  # of a whole eager message
HEADER_BYTES = 16 << 10  # of a header in front of parts
PACKED_BYTES = 16 << 10  # a part up to this size is copied into the section
MAX_PAYLOADS = 512  # that one eager message announces
DEVICE_SHIFT = 56  # position of the device in the number that announces a payload

FIXED = struct.Struct("<BBHIQQII")
FIXED_BYTES = FIXED.size
ALL_PAYLOADS = 1 << 15  # no part is packed
CONTINUED = 1 << 14  # the next eager message belongs to the same message
_IS_PAYLOAD = 1 << 63


def encode(
    numbers: tuple[int, int, int, int, int],
    header: bytes | bytearray,
    parts: Sequence[Part],
    devices: Sequence[int | None],
) -> tuple[list[bytes], list[Part]]:
    """Encode the eager messages of a message with parts.

    Args:
        numbers: Kind, flags, generation, sequence and context.
        header: At most ``HEADER_BYTES``.
        devices: For each part, the index of the receiver's device; None for host memory.

    Returns:
        The eager messages, and the payloads that follow.
    """
    section, payloads, places = pack_parts(parts, devices)
    packed, mark = len(section), 0 if section else ALL_PAYLOADS
    room = EAGER_BYTES - FIXED_BYTES - 8 * min(len(payloads), MAX_PAYLOADS) - len(header)
    if packed > room:
        payloads, places, packed = [section, *payloads], [None, *places], 0
    sizes = [
        nbytes_of(memory) | (0 if device is None else device + 1) << DEVICE_SHIFT
        for memory, device in zip(payloads, places, strict=True)
    ]
    messages = []
    while len(sizes) > MAX_PAYLOADS:
        fixed = FIXED.pack(*numbers[:2], MAX_PAYLOADS | CONTINUED, *numbers[2:], 0, 0)
        messages.append(fixed + struct.pack(f"<{MAX_PAYLOADS}Q", *sizes[:MAX_PAYLOADS]))
        del sizes[:MAX_PAYLOADS]
    fixed = FIXED.pack(*numbers[:2], len(sizes) | mark, *numbers[2:], len(header), packed)
    announced = struct.pack(f"<{len(sizes)}Q", *sizes)
    messages.append(b"".join((fixed, announced, header, section if packed else b"")))
    return messages, payloads


def decode(source: int, data: bytearray, fields: tuple[int, ...]) -> tuple[Incoming, int]:
    """Decode an eager message with payloads or packed parts.

    Args:
        source: The sender's rank.
        fields: The numbers of the fixed part.

    Returns:
        The message, with ``damage`` if its lengths do not fit; and the number of payloads that it
            announces.
    """
    kind, flags, marked, _, sequence, context, header_bytes, packed = fields
    count = marked & ~(ALL_PAYLOADS | CONTINUED)
    start = FIXED_BYTES + 8 * count
    end = start + header_bytes
    if len(data) == end + packed and count <= MAX_PAYLOADS:
        incoming = Incoming(source, kind, flags, sequence, context, data, start, end)
        incoming.is_continued = bool(marked & CONTINUED)
        if packed:
            incoming.section = memoryview(data)[end:]
        elif 0 < marked < ALL_PAYLOADS:
            incoming.section = 0
        return incoming, count
    # The header cannot be located; kind, sequence and context are valid nevertheless.
    incoming = Incoming(source, kind, 0, sequence, context, data, FIXED_BYTES, FIXED_BYTES)
    incoming.is_continued = bool(marked & CONTINUED)
    incoming.damage = FrameError(
        f"message of {len(data)} bytes from rank {source} announces {count} payloads, a header of "
        f"{header_bytes} bytes and {packed} packed ones"
    )
    return incoming, count


def pack_parts(
    parts: Sequence[Part], devices: Sequence[int | None]
) -> tuple[bytes | bytearray, list[Part], list[int | None]]:
    """Return the packed section, the payloads, and the payloads' devices.

    The section is empty if all parts are payloads.
    """
    lengths: list[int] = []
    packed: list[Part] = []
    payloads: list[Part] = []
    where: list[int | None] = []
    for place, part in enumerate(parts):
        nbytes = nbytes_of(part)
        device = devices[place] if devices else None
        is_host = device is None and not (isinstance(part, torch.Tensor) and not part.is_cpu)
        if is_host and nbytes <= PACKED_BYTES:
            lengths.append(nbytes)
            packed.append(part)
        else:
            lengths.append(nbytes | _IS_PAYLOAD)
            payloads.append(part)
            where.append(device)
    if not packed:
        return b"", payloads, where
    section = bytearray(struct.pack(f"<I{len(lengths)}Q", len(lengths), *lengths))
    for part in packed:
        # numpy() would export the memory, and a tensor whose memory is exported cannot be resized.
        section += (
            buffer.memory(part.data_ptr(), part.nbytes)
            if isinstance(part, torch.Tensor)
            else memoryview(part).cast("B")
        )
    return section, payloads, where


def unpack_parts(incoming: Incoming) -> None:
    """Set the parts of a complete message in the order of sending; on failure, set its damage."""
    try:
        _read_section(incoming)
    except FrameError as error:
        incoming.parts, incoming.damage = (), error


def _read_section(incoming: Incoming) -> None:
    payloads = list(incoming.parts)
    section, incoming.section = incoming.section, None
    if isinstance(section, int):
        section = payloads.pop(0)
    assert section is not None
    if isinstance(section, torch.Tensor):
        raise FrameError(
            f"a message of rank {incoming.source}: its packed parts lie on {section.device}"
        )
    try:
        (count,) = struct.unpack_from("<I", section)
        lengths = struct.unpack_from(f"<{count}Q", section, 4)
        place = 4 + 8 * count
        parts: list[Part] = []
        following = iter(payloads)
        for length in lengths:
            if length & _IS_PAYLOAD:
                part = next(following)
                if nbytes_of(part) != length ^ _IS_PAYLOAD:
                    raise FrameError(
                        f"a payload of {nbytes_of(part)} bytes in the place of "
                        f"{length ^ _IS_PAYLOAD}"
                    )
                parts.append(part)
            else:
                # A copy, because a small part must not keep the memory of all others alive.
                parts.append(memoryview(bytearray(section[place : place + length])))
                place += length
        if place != len(section) or next(following, None) is not None:
            raise FrameError(f"{len(section)} packed bytes do not hold what they announce")
    except (struct.error, StopIteration) as error:
        raise FrameError(
            f"a message of rank {incoming.source}: its parts do not hold what it announces"
        ) from error
    incoming.parts = parts
