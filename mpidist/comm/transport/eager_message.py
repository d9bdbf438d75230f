"""Eager message: the layout of a fixed part, the sizes of payloads, a header and packed parts.

::

    kind u8 | flags u8 | payloads n u16 (top bit: no part is packed) | generation u32 | sequence u64
    context u64 | header bytes u32 | packed bytes u32                                     (32 bytes)
    n payloads: bytes u64; the top byte is the device index + 1, 0 for host memory
    header
    section: parts m u32 | m × u64 (bytes; top bit: a payload) | the packed parts, end to end

The section is empty if all parts are payloads. A section that does not fit into the eager message
travels as the first payload.

A part on a device, or for one, is never packed. Where there are more of them than payloads, the
smallest are joined: copied into one payload for each pair of devices, at multiples of 128 bytes.
The number of a joined part in the section has bit 62 set, the payload's index in bits 48 to 61,
and the bytes below.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from mpidist.comm.memory import buffer
from mpidist.comm.serialization.tensor_format import Part
from mpidist.comm.transport.incoming import Incoming, nbytes_of
from mpidist.errors import FrameError

EAGER_BYTES = 32 << 10  # of a whole eager message
HEADER_BYTES = 16 << 10  # of a header in front of parts
PACKED_BYTES = 16 << 10  # a part up to this size is copied into the section
MAX_PAYLOADS = 512  # parts beyond this number are packed or joined
DEVICE_SHIFT = 56  # position of the device in the number that announces a payload

FIXED = struct.Struct("<BBHIQQII")
FIXED_BYTES = FIXED.size
ALL_PAYLOADS = 1 << 15  # no part is packed
_IS_PAYLOAD = 1 << 63
_IS_JOINED = 1 << 62
_INDEX_SHIFT = 48  # position of the payload's index in the number of a joined part
_ALIGNMENT_BYTES = 128  # of joined parts: a cache line of a GPU, and more than any dtype


def encode(
    numbers: tuple[int, int, int, int, int],
    header: bytes | bytearray,
    parts: Sequence[Part],
    devices: Sequence[int | None],
) -> tuple[bytes, list[Part]]:
    """Encode the eager message of a message with parts.

    Args:
        numbers: Kind, flags, generation, sequence and context.
        header: At most ``HEADER_BYTES``.
        devices: For each part, the index of the receiver's device; None for host memory.

    Returns:
        The eager message, and the payloads that follow.
    """
    section, payloads, places = pack_parts(parts, devices)
    packed, mark = len(section), 0 if section else ALL_PAYLOADS
    if packed > EAGER_BYTES - FIXED_BYTES - 8 * len(payloads) - len(header):
        payloads, places, packed = [section, *payloads], [None, *places], 0
    fixed = FIXED.pack(*numbers[:2], len(payloads) | mark, *numbers[2:], len(header), packed)
    sizes = [
        nbytes_of(memory) | (0 if device is None else device + 1) << DEVICE_SHIFT
        for memory, device in zip(payloads, places, strict=True)
    ]
    announced = struct.pack(f"<{len(sizes)}Q", *sizes)
    return b"".join((fixed, announced, header, section if packed else b"")), payloads


def decode(source: int, data: bytearray, fields: tuple[int, ...]) -> tuple[Incoming, int]:
    """Decode an eager message with payloads or packed parts.

    Args:
        source: The sender's rank.
        fields: The numbers of the fixed part.

    Returns:
        The message, with ``damage`` if its lengths do not fit; and its number of payloads.
    """
    kind, flags, marked, _, sequence, context, header_bytes, packed = fields
    count = marked & ~ALL_PAYLOADS
    start = FIXED_BYTES + 8 * count
    end = start + header_bytes
    if len(data) == end + packed and count <= MAX_PAYLOADS + 1:
        incoming = Incoming(source, kind, flags, sequence, context, data, start, end)
        if packed:
            incoming.section = memoryview(data)[end:]
        elif 0 < marked < ALL_PAYLOADS:
            incoming.section = 0
        return incoming, count
    # The header cannot be located; kind, sequence and context are valid nevertheless.
    incoming = Incoming(source, kind, 0, sequence, context, data, FIXED_BYTES, FIXED_BYTES)
    incoming.damage = FrameError(
        f"message of {len(data)} bytes from rank {source} announces {count} payloads, a header of "
        f"{header_bytes} bytes and {packed} packed ones"
    )
    return incoming, count


def pack_parts(
    parts: Sequence[Part], devices: Sequence[int | None]
) -> tuple[bytes | bytearray, list[Part], list[int | None]]:
    """Return the packed section, the payloads, and the payloads' devices.

    The section is empty if all parts are payloads. Joined parts are copied on the calling thread's
    current stream.
    """
    lengths: list[int] = []
    packed: list[Part] = []
    payloads: list[Part] = []
    where: list[int | None] = []
    # With as many payloads as parts may be, nothing is joined.
    joined = _join(parts, devices) if len(parts) > MAX_PAYLOADS else _NOTHING_JOINED
    most_on_host = MAX_PAYLOADS - joined.n_payloads
    on_host = 0
    for place, part in enumerate(parts):
        nbytes = nbytes_of(part)
        device = devices[place] if devices else None
        if place in joined.numbers:
            # The index of its payload is added below: joined payloads follow the others.
            lengths.append(nbytes | _IS_JOINED)
        elif (is_host := _is_host(part, device)) and (
            nbytes <= PACKED_BYTES or on_host >= most_on_host
        ):
            lengths.append(nbytes)
            packed.append(part)
        else:
            on_host += is_host
            lengths.append(nbytes | _IS_PAYLOAD)
            payloads.append(part)
            where.append(device)
    for place, number in joined.numbers.items():
        lengths[place] |= len(payloads) + number << _INDEX_SHIFT
    payloads += joined.payloads
    where += joined.devices
    if not packed and not joined.numbers:
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


class _Joined(NamedTuple):
    """Parts that are copied into common payloads.

    Attributes:
        payloads: The common payloads.
        devices: The receiver's device index of each; None for host memory.
        numbers: Key: index of a joined part. Value: index of its payload in ``payloads``.
        n_payloads: The payloads, and the parts on devices or for devices that are not joined.
    """

    payloads: list[Part]
    devices: list[int | None]
    numbers: dict[int, int]
    n_payloads: int


_NOTHING_JOINED = _Joined([], [], {}, 0)


def _is_host(part: Part, device: int | None) -> bool:
    return device is None and not (isinstance(part, torch.Tensor) and not part.is_cpu)


def _join(parts: Sequence[Part], devices: Sequence[int | None]) -> _Joined:
    """Copy the smallest of the parts on devices or for devices, if they are more than payloads."""
    to = devices or [None] * len(parts)
    apart = [
        (nbytes_of(part), index)
        for index, part in enumerate(parts)
        if not _is_host(part, to[index])
    ]
    if len(apart) <= MAX_PAYLOADS:
        return _Joined([], [], {}, len(apart))
    pairs = {(_device_of(parts[index]), to[index]) for _, index in apart}
    n_joined = len(apart) + len(pairs) - MAX_PAYLOADS
    # A part of its own is received without a copy, so that the largest stay alone.
    members: defaultdict[tuple[torch.device, int | None], list[int]] = defaultdict(list)
    for index in sorted(index for _, index in sorted(apart)[:n_joined]):
        members[_device_of(parts[index]), to[index]].append(index)
    payloads: list[Part] = []
    numbers: dict[int, int] = {}
    for (source, _), indices in members.items():
        numbers.update(dict.fromkeys(indices, len(payloads)))
        payloads.append(_joined(source, [_bytes_of(parts[index]) for index in indices]))
    n_payloads = len(apart) - n_joined + len(payloads)
    return _Joined(payloads, [device for _, device in members], numbers, n_payloads)


def _joined(source: torch.device, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return flat memory on a device with the bytes of parts that lie there."""
    offsets = list(_offsets([part.nbytes for part in parts]))
    flat = torch.empty(offsets[-1], dtype=torch.uint8, device=source)
    into = [flat[start : start + part.nbytes] for start, part in zip(offsets, parts, strict=False)]
    torch._foreach_copy_(into, parts)
    return flat


def _offsets(sizes: Sequence[int]) -> Iterator[int]:
    """Yield the offset of each part of a joined payload, and the payload's size."""
    offset = 0
    for nbytes in sizes:
        yield offset
        offset += _aligned(nbytes)
    yield offset


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _device_of(part: Part) -> torch.device:
    return part.device if isinstance(part, torch.Tensor) else _HOST


_HOST = torch.device("cpu")


def _bytes_of(part: Part) -> torch.Tensor:
    """Return a part's memory as a flat tensor of bytes."""
    if isinstance(part, torch.Tensor):
        return _slice(part, int(part.storage_offset()) * part.element_size(), part.nbytes)
    if not nbytes_of(part):
        return torch.empty(0, dtype=torch.uint8, device=_HOST)
    return torch.frombuffer(bytearray(part), dtype=torch.uint8)


def _slice(memory: torch.Tensor, start: int, nbytes: int) -> torch.Tensor:
    """Return bytes of a tensor's storage as a tensor that shares no version with it."""
    flat = torch.empty(0, dtype=torch.uint8, device=memory.device)
    return flat.set_(memory.untyped_storage(), start, (nbytes,), (1,))


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
        shared: list[int] = []
        joined = _JoinedPayloads(payloads, lengths)
        following = iter(joined.others)
        for length in lengths:
            if length & _IS_PAYLOAD:
                part = next(following)
                if nbytes_of(part) != length ^ _IS_PAYLOAD:
                    raise FrameError(
                        f"a payload of {nbytes_of(part)} bytes in the place of "
                        f"{length ^ _IS_PAYLOAD}"
                    )
                parts.append(part)
            elif length & _IS_JOINED:
                parts.append(joined.take(length))
                if isinstance(parts[-1], torch.Tensor):
                    shared.append(len(parts) - 1)
            else:
                # A copy, because a small part must not keep the memory of all others alive.
                parts.append(memoryview(bytearray(section[place : place + length])))
                place += length
        if place != len(section) or next(following, None) is not None or not joined.are_used_up():
            raise FrameError(f"{len(section)} packed bytes do not hold what they announce")
    except (struct.error, StopIteration, LookupError) as error:
        raise FrameError(
            f"a message of rank {incoming.source}: its parts do not hold what it announces"
        ) from error
    incoming.parts, incoming.joined = parts, shared


class _JoinedPayloads:
    """Payloads of joined parts, and the offset in each behind the parts that were taken.

    Args:
        payloads: All payloads.
        lengths: The numbers of all parts.

    Attributes:
        others: The payloads that are parts of their own, in order.
    """

    def __init__(self, payloads: Sequence[Part], lengths: Sequence[int]) -> None:
        joined = [
            _index_of(length) for length in lengths if length & _IS_JOINED and length < _IS_PAYLOAD
        ]
        self._offsets = dict.fromkeys(joined, 0)
        self._payloads = payloads
        self.others = [part for index, part in enumerate(payloads) if index not in self._offsets]

    def take(self, length: int) -> Part:
        """Return the next part of a joined payload: host memory is copied, device memory is not.

        Raises:
            LookupError: There is no such payload, or it has ended.
        """
        index, nbytes = _index_of(length), length & ((1 << _INDEX_SHIFT) - 1)
        payload, start = self._payloads[index], self._offsets[index]
        if start + nbytes > nbytes_of(payload):
            raise LookupError
        self._offsets[index] = start + _aligned(nbytes)
        if isinstance(payload, torch.Tensor):
            return _slice(payload, int(payload.storage_offset()) + start, nbytes)
        return memoryview(bytearray(payload[start : start + nbytes]))

    def are_used_up(self) -> bool:
        """Return whether all bytes of the payloads belong to the parts that were taken."""
        return all(
            offset == nbytes_of(self._payloads[index]) for index, offset in self._offsets.items()
        )


def _index_of(length: int) -> int:
    return (length & ~_IS_JOINED) >> _INDEX_SHIFT
