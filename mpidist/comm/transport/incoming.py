"""Parts of messages: which are packed into one section and which travel as payloads, and back.

::

    section: parts m u32 | m × u64 (bytes; top bit: a payload) | the packed parts, end to end
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpidist.comm.memory import buffer
from mpidist.comm.memory.stream import used_here
from mpidist.errors import FrameError

PACKED_BYTES = 16 << 10  # a part up to this size is copied into the section
MAX_PAYLOADS = 512  # more large parts than these are copied, too
_IS_PAYLOAD = 1 << 63

Part = Any  # a contiguous torch.Tensor, or an object with the buffer protocol


class Incoming:
    """A message that has arrived, in part or whole.

    Attributes:
        source: The sender's rank.
        kind: The sender's, as are ``flags``, ``sequence`` and ``context``.
        data: The eager message, in memory of its own; the header is ``data[start:end]``.
        parts: Memory of the parts, or device tensors; complete once ``is_complete``.
        is_new: The message is returned for the first time.
        noted: The reader's, as is ``action``.
        receives: Under way for its payloads: (request, bytes announced).
        arrive: Bring payloads to their devices, and return events.
        section: The packed parts; 0 for the first payload, None once unpacked.
        damage: The reason why its parts cannot be read, else None.
    """

    __slots__ = (
        *(
            "source",
            "kind",
            "flags",
            "sequence",
            "context",
            "data",
            "start",
            "end",
            "parts",
            "is_new",
            "noted",
            "action",
        ),
        *("arrive", "receives", "section", "damage"),
    )

    def __init__(
        self,
        source: int,
        kind: int,
        flags: int,
        sequence: int,
        context: int,
        data: Any,
        start: int,
        end: int,
    ) -> None:
        self.source, self.kind, self.flags = source, kind, flags
        self.sequence, self.context = sequence, context
        self.data, self.start, self.end = data, start, end
        self.parts: Sequence[Part] = ()
        self.is_new = True
        self.noted: Any = None
        self.action: Any = None
        self.receives: Sequence[Any] = ()
        self.arrive: Sequence[Callable[[], list[Any]]] = ()
        self.section: Any = None
        self.damage: FrameError | None = None

    @property
    def is_complete(self) -> bool:
        """Say whether all parts are there."""
        return not self.receives

    def bring(self) -> None:
        """Bring parts to their devices; the calling thread's current stream waits until they are there."""
        for arrive in self.arrive:
            for event in arrive():
                event.hold()
        self.arrive = ()
        for part in self.parts:
            if isinstance(part, torch.Tensor):
                used_here(part)


def arranged(
    parts: Sequence[Part], devices: Sequence[int | None]
) -> tuple[Any, list[Part], list[int | None]]:
    """Return the packed section, empty if all parts are payloads, and the payloads with their devices."""
    lengths: list[int] = []
    packed: list[Any] = []
    payloads: list[Part] = []
    where: list[int | None] = []
    for place, part in enumerate(parts):
        nbytes = nbytes_of(part)
        device = devices[place] if devices else None
        is_host = device is None and not (isinstance(part, torch.Tensor) and not part.is_cpu)
        if is_host and (nbytes <= PACKED_BYTES or len(payloads) >= MAX_PAYLOADS):
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
        # Not numpy(): a tensor whose memory it has seen cannot be resized any more.
        section += (
            buffer.memory(part.data_ptr(), part.nbytes)
            if isinstance(part, torch.Tensor)
            else memoryview(part).cast("B")
        )
    return section, payloads, where


def unpack(incoming: Incoming) -> None:
    """Give a complete message its parts in the order in which they were sent; or none, and say why."""
    try:
        _unpack(incoming)
    except FrameError as error:
        incoming.parts, incoming.damage = (), error


def _unpack(incoming: Incoming) -> None:
    payloads = list(incoming.parts)
    section = incoming.section
    if section == 0:
        section = payloads.pop(0)
    incoming.section = None
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
                # A copy: a small part must not keep all of the others in memory.
                parts.append(memoryview(bytearray(section[place : place + length])))
                place += length
        if place != len(section) or next(following, None) is not None:
            raise FrameError(f"{len(section)} packed bytes do not hold what they announce")
    except (struct.error, StopIteration) as error:
        raise FrameError(
            f"a message of rank {incoming.source}: its parts do not hold what it announces"
        ) from error
    incoming.parts = parts


def nbytes_of(part: Part) -> int:
    """Return a part's size."""
    return part.nbytes if isinstance(part, torch.Tensor) else memoryview(part).nbytes
