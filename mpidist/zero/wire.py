"""Wire formats: the representation of shards on the network after a step of the sharded optimizer.

Each rank owns a contiguous shard of a flat parameter buffer, and keeps a *master* copy of that
shard in full precision, which its optimizer steps. A wire sends all shards to all ranks in a
narrow format. Afterwards the visible parameters (the flat buffer) have the same bits on all ranks,
the owner too; the masters keep the precision that the format loses.

| wire | sends | bytes an element |
| --- | --- | --- |
| ``HalfWire`` | the master, rounded to bfloat16 or float16 | 2 |
| ``Int8Wire`` | the change of the parameters, blockwise int8 with error feedback | 1 + 4/256 |

Letters: W ranks of the group; N elements of the flat buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from mpidist.comm.group_types import Group
from mpidist.zero.wire_half import HalfWire
from mpidist.zero.wire_int8 import Int8Wire


class Wire(Protocol):
    """A format of shards on the network; one object may serve any number of flat buffers.

    Attributes:
        name: As ``wire_of`` takes it.
        is_rounding: The values that all ranks see are the master, rounded to a half type.
    """

    name: str
    is_rounding: bool

    def master_dtype(self, flat_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of masters of a flat buffer: the buffer's own.

        Raises:
            TypeError: The format cannot carry such a buffer.
        """

    def share(
        self, group: Group, master: torch.Tensor, flat: torch.Tensor, bounds: Sequence[int]
    ) -> None:
        """Send this rank's shard to all ranks, and receive theirs into ``flat``.

        At W = 1 nothing is sent, and ``flat`` gets the master's values without rounding.

        Collective: over ``group``.

        Blocks: until this rank's part has ended; on CUDA the current stream waits for the rest.

        Args:
            master: Contiguous tensor of the elements of this rank's shard, of ``flat``'s dtype and
                on its device. Not changed.
            flat: Contiguous tensor of shape (N,); equal on all ranks before and after. Only the
                elements within the bounds are written.
            bounds: W + 1 ascending offsets; rank r owns ``flat[bounds[r]:bounds[r + 1]]``, which
                may be empty. Equal on all ranks.

        Raises:
            ValueError: Sizes, bounds or devices do not fit; on this rank, before anything is sent.
            TypeError: The dtypes do not fit the wire; likewise.
        """

    def nbytes(self, bounds: Sequence[int]) -> int:
        """Return the most bytes that a rank sends and receives in one ``share``; 0 at W = 1."""


_WIRES: dict[str | torch.dtype, Callable[[], Wire]] = {
    "bf16": partial(HalfWire, torch.bfloat16),
    "fp16": partial(HalfWire, torch.float16),
    "int8": Int8Wire,
    torch.bfloat16: partial(HalfWire, torch.bfloat16),
    torch.float16: partial(HalfWire, torch.float16),
    torch.int8: Int8Wire,
}


def wire_of(name: str | torch.dtype | None) -> Wire | None:
    """Return a new wire by its name or dtype; None for None: shards are sent in their own dtype.

    Raises:
        ValueError: No such wire.
    """
    if name is None:
        return None
    make = _WIRES.get(name) if isinstance(name, (str, torch.dtype)) else None
    if make is None:
        raise ValueError(
            f"wire must be None or one of {', '.join(map(repr, _WIRES))}; got {name!r}"
        )
    return make()
