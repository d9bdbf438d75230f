"""What all ranks of a data-parallel module must hold alike, before the first step and before each forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpidist.errors import DisagreementError


def require_equal_parameters(group: Any, named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Compare names, shapes, strides and dtypes of the parameters; a bucket holds elements in the order of memory.

    Collective: over the group.

    Raises:
        DisagreementError: On all ranks, naming the first parameter that differs and what each rank holds.
    """
    own = [(name, tuple(p.shape), str(p.dtype), p.stride()) for name, p in named]
    tables = group.all_gather_object(own)
    if all(table == tables[0] for table in tables):
        return
    for place in range(max(len(table) for table in tables)):
        rows = [table[place] if place < len(table) else None for table in tables]
        if len(set(rows)) > 1:
            told = "; ".join(f"rank {rank}: {_text(row)}" for rank, row in enumerate(rows))
            raise DisagreementError(f"DistributedDataParallel: parameter {place} differs between ranks. {told}")


def broadcast_state(group: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Give rank 0's values to all. Collective: over the group."""
    for tensor in tensors:
        if tensor.numel():
            group.broadcast(tensor.detach(), 0)


def _text(row: tuple[str, tuple[int, ...], str, tuple[int, ...]] | None) -> str:
    return "none" if row is None else f"{row[0]} {row[1]} {row[2]} strides {row[3]}"
