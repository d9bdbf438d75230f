"""Incoming message: its fields, and its parts from the eager message until they are complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from mpidist.comm.memory.stream import Event, used_here
from mpidist.comm.mpi.library import MPI
from mpidist.comm.serialization.tensor_format import Part
from mpidist.errors import FrameError

# Copies a payload to its device; returns the events that are recorded behind the copy.
Arrive: TypeAlias = Callable[[], list[Event]]


class Request(Protocol):
    """A request of MPI, as the transport uses it."""

    def Test(self, status: MPI.Status) -> bool:
        """See MPI_Test."""


class Incoming:
    """A message whose eager message has arrived.

    Attributes:
        source: The sender's rank.
        kind: Set by the sender, as are ``flags``, ``sequence`` and ``context``.
        data: The eager message, in memory of its own; the header is ``data[start:end]``.
        parts: Memory of the parts, or device tensors; valid once ``is_complete``.
        is_new: The message is returned for the first time.
        preamble: Autograd's number of the message, and its references; set by the reader.
        action: For the reader's use.
        receives: Under way for its payloads: (request, bytes announced).
        arrive: Functions that copy payloads to their devices and return events.
        section: The packed parts; 0 if they are the first payload, None once unpacked.
        is_continued: The sender's next eager message with payloads belongs to the same message.
        damage: The reason why its parts cannot be read, else None.
        number: Of its eager message, for ``Transport.take``.
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
            "preamble",
            "action",
        ),
        *("arrive", "receives", "section", "is_continued", "damage", "number"),
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
        self.preamble: tuple[int, Sequence[tuple[int, int, int]]] = (0, ())
        self.action: Any = None
        self.receives: Sequence[tuple[Request, int]] = ()
        self.arrive: Sequence[Arrive] = ()
        self.section: Part | int | None = None
        self.is_continued = False
        self.damage: FrameError | None = None
        self.number = -1

    @property
    def is_complete(self) -> bool:
        """Return whether all parts have arrived."""
        return not self.receives

    def to_devices(self) -> None:
        """Copy parts to their devices; the calling thread's current stream waits for the copies."""
        for arrive in self.arrive:
            for event in arrive():
                event.block_current_stream()
        self.arrive = ()
        for part in self.parts:
            if isinstance(part, torch.Tensor):
                used_here(part)


def nbytes_of(part: Part) -> int:
    """Return a part's size in bytes."""
    return part.nbytes if isinstance(part, torch.Tensor) else memoryview(part).nbytes
