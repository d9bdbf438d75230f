"""Agreement of all ranks: rows that they compare, and errors that they raise together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpidist.comm.algorithms.reduce_op import MAX
from mpidist.errors import DisagreementError

Row = tuple[str, Any]  # what it is, and what this rank holds


def require_alike(
    group: Any, where: str, rows: Sequence[Row], error: Exception | None = None
) -> None:
    """Compare rows between ranks, and learn whether any rank refuses.

    Collective: over the group.

    Args:
        where: Begins the messages.
        error: Why this rank cannot go on.

    Raises:
        DisagreementError: On all ranks that refuse nothing themselves: the first row that differs
            and what each rank holds, or who refuses and why.
        Exception: ``error``, on a rank that has one.
    """
    told = group.all_gather_object(
        (None if error is None else f"{type(error).__name__}: {error}", list(rows))
    )
    refused = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(told) if text is not None]
    if error is not None:
        raise error
    if refused:
        raise DisagreementError(f"{where} was refused. {'; '.join(refused)}")
    tables = [table for _, table in told]
    if all(table == tables[0] for table in tables):
        return
    for place in range(max(map(len, tables))):
        held = [table[place] if place < len(table) else ("nothing", "") for table in tables]
        if any(row != held[0] for row in held):
            words = "; ".join(
                f"rank {rank}: {name} {value}" for rank, (name, value) in enumerate(held)
            )
            raise DisagreementError(f"{where}: ranks differ. {words}")


def highest(group: Any, code: int) -> int:
    """Return the highest of all ranks' codes, which is a barrier, too.

    Collective: over the group.
    """
    if group.size == 1:
        return code
    held = torch.tensor([code], dtype=torch.int32, device="cpu")
    group.all_reduce(held, MAX)
    return int(held)


def raise_together(group: Any, where: str, error: Exception | None) -> None:
    """Raise on all ranks if any has an error. Collective: over the group."""
    if highest(group, int(error is not None)):
        require_alike(group, where, (), error)
