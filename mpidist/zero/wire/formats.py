"""Wire formats by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from mpidist.zero.wire.half import HalfWire
from mpidist.zero.wire.wire import Wire

_WIRES: dict[str | torch.dtype, Callable[[], Wire]] = {
    "bf16": partial(HalfWire, torch.bfloat16),
    "fp16": partial(HalfWire, torch.float16),
    torch.bfloat16: partial(HalfWire, torch.bfloat16),
    torch.float16: partial(HalfWire, torch.float16),
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
